import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import dockerfile from "highlight.js/lib/languages/dockerfile";
import go from "highlight.js/lib/languages/go";
import ini from "highlight.js/lib/languages/ini";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import shell from "highlight.js/lib/languages/shell";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { createLowlight } from "lowlight";
import type { ComponentChild } from "preact";

const LONGEST = 10_000;
const LONGEST_OPEN = 2_000;
const DEEPEST = 16;

const languages = createLowlight({
  ...{ bash, c, cpp, css, diff, dockerfile, go, ini, java, javascript, json, python, rust, shell, sql, typescript, xml, yaml },
});
languages.registerAlias({ cpp: ["cuda", "cu"], python: ["python3"] });

type Node = ReturnType<typeof languages.highlight>["children"][number];

/** Code with its words told apart. What is too long, or in a language not known here, stays plain. So does the end of
 * code that is still `open`: its beginning is not worked out anew with every token. */
export function highlighted(text: string, language: string, open: boolean): ComponentChild {
  if (text.length > LONGEST || !languages.registered(language)) return text;
  if (!open || text.length <= LONGEST_OPEN) return words(text, language);
  const end = text.lastIndexOf("\n", LONGEST_OPEN) + 1;
  if (last.text !== text.slice(0, end) || last.language !== language)
    last = { text: text.slice(0, end), language, drawn: words(text.slice(0, end), language) };
  return [last.drawn, text.slice(end)];
}

let last: { text: string; language: string; drawn: ComponentChild } = { text: "", language: "", drawn: "" };

function words(text: string, language: string): ComponentChild {
  return languages.highlight(language, text, { prefix: "hl-" }).children.map((node) => drawn(node, 0));
}

function drawn(node: Node, depth: number): ComponentChild {
  if (node.type === "text") return node.value;
  if (node.type !== "element") return null;
  if (depth > DEEPEST) return textOf(node);
  const [name] = node.properties.className as string[];
  return <span class={name}>{node.children.map((each) => drawn(each, depth + 1))}</span>;
}

/** Without recursion: what a model writes may be nested by the thousand. */
function textOf(node: Node): string {
  const left = [node];
  let text = "";
  for (let next = left.pop(); next; next = left.pop()) {
    if (next.type === "text") text += next.value;
    else if (next.type === "element") left.push(...next.children.toReversed());
  }
  return text;
}
