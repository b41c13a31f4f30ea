import { Component, type ComponentChild } from "preact";
import { CopyButton } from "../ui/copy";
import { highlighted } from "./highlight";
import { inline } from "./inline";

/** Markdown as nodes. Nothing here makes HTML from text: what is not understood stays the text it is. */

const DEEPEST = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const TABLE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

type Kind = "code" | "heading" | "rule" | "quote" | "list" | "table" | "paragraph";
interface Block {
  kind: Kind;
  lines: string[];
}

export function Markdown(props: { text: string }) {
  return <div class="md">{draw(props.text.split("\n"), 0)}</div>;
}

function draw(lines: string[], depth: number): ComponentChild[] {
  if (depth > DEEPEST) return [lines.join("\n")];
  return blocks(lines).map((block, index) => <BlockView key={index} {...block} depth={depth} />);
}

/** A block is drawn once: while an answer grows, only its last one changes. */
class BlockView extends Component<Block & { depth: number }> {
  shouldComponentUpdate(next: Block): boolean {
    const { kind, lines } = this.props;
    return kind !== next.kind || lines.length !== next.lines.length || lines.some((line, at) => line !== next.lines[at]);
  }

  render() {
    const { kind, lines, depth } = this.props;
    if (kind === "code") return <Code lines={lines} />;
    if (kind === "rule") return <hr />;
    if (kind === "quote")
      return <blockquote>{draw(lines.map((line) => line.replace(QUOTE, "")), depth + 1)}</blockquote>;
    if (kind === "list") return <List lines={lines} depth={depth} />;
    if (kind === "table") return <Table lines={lines} />;
    if (kind === "paragraph") return <p>{inline(lines.join("\n"))}</p>;
    const marks = HEADING.exec(lines[0]!)!;
    const Tag = `h${Math.min(6, marks[1]!.length + 2)}` as "h3";
    return <Tag>{inline(lines[0]!.slice(marks[0].length))}</Tag>;
  }
}

/** Lines in blocks. A fence without an end reaches to the end of the text, as it does while it streams. */
function blocks(lines: string[]): Block[] {
  const found: Block[] = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at]!.trim()) {
      at++;
      continue;
    }
    const kind = kindAt(lines, at);
    const stop = endOf(kind, lines, at);
    found.push({ kind, lines: lines.slice(at, stop) });
    at = stop;
  }
  return found;
}

function kindAt(lines: string[], at: number): Kind {
  const line = lines[at]!;
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return line.includes("|") && TABLE.test(lines[at + 1] ?? "") && lines[at + 1]!.includes("|") ? "table" : "paragraph";
}

function endOf(kind: Kind, lines: string[], start: number): number {
  if (kind === "heading" || kind === "rule") return start + 1;
  if (kind === "code") {
    const fence = FENCE.exec(lines[start]!)![1]!;
    const closes = (line: string) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0]!, "");
    const end = lines.findIndex((line, index) => index > start && closes(line));
    return end < 0 ? lines.length : end + 1;
  }
  let at = start + 1;
  const continues = () => {
    const line = lines[at]!;
    if (kind === "list") return line.trim() ? /^ {2}/.test(line) || sameList(lines[start]!, line) || isLazy() : goesOn();
    if (!line.trim()) return false;
    return kind === "table" ? line.includes("|") : kindAt(lines, at) === kind;
  };
  const isLazy = () => lines[at - 1]!.trim() !== "" && kindAt(lines, at) === "paragraph";
  const goesOn = () => /^ {2,}\S/.test(lines[at + 1] ?? "") || sameList(lines[start]!, lines[at + 1] ?? "");
  while (at < lines.length && continues()) at++;
  return at;
}

function sameList(first: string, next: string): boolean {
  const [one, other] = [ITEM.exec(first)?.[2], ITEM.exec(next)?.[2]];
  return one !== undefined && other !== undefined && (one.length === 1) === (other.length === 1);
}

function Code(props: { lines: string[] }) {
  const fence = FENCE.exec(props.lines[0]!)!;
  const last = props.lines.at(-1)!.trim();
  const closed = props.lines.length > 1 && last.startsWith(fence[1]!) && !last.replaceAll(fence[1]![0]!, "");
  const text = props.lines.slice(1, closed ? -1 : undefined).join("\n");
  const [language = ""] = fence[2]!.trim().toLowerCase().split(/[\s{:]/, 1);
  return (
    <figure class="md-code">
      <figcaption>
        <span>{fence[2]!.trim() || "text"}</span>
        <CopyButton text={text} what="this code" />
      </figcaption>
      <pre tabIndex={0} aria-label="Code">
        <code>{highlighted(text, language, !closed)}</code>
      </pre>
    </figure>
  );
}

function List(props: { lines: string[]; depth: number }) {
  const [, indent, marker] = ITEM.exec(props.lines[0]!)!;
  const inset = new RegExp(`^ {0,${indent!.length + marker!.length + 1}}`);
  const items: string[][] = [];
  for (const line of props.lines) {
    const item = ITEM.exec(line);
    if (item && item[1]!.length <= indent!.length + 1) items.push([line.slice(item[0].length)]);
    else items.at(-1)!.push(line.replace(inset, ""));
  }
  const drawn = items.map((item, index) => <li key={index}>{drawItem(item, props.depth + 1)}</li>);
  return marker!.length > 1 ? <ol start={Number.parseInt(marker!, 10)}>{drawn}</ol> : <ul>{drawn}</ul>;
}

/** An item's first paragraph stands beside its mark. */
function drawItem(lines: string[], depth: number): ComponentChild[] {
  const stop = kindAt(lines, 0) === "paragraph" ? endOf("paragraph", lines, 0) : 0;
  return [...inline(lines.slice(0, stop).join("\n")), ...draw(lines.slice(stop), depth)];
}

function Table(props: { lines: string[] }) {
  const [head, , ...rows] = props.lines.map((line) => line.trim().replace(/^\||\|$/g, "").split("|"));
  const columns = Array.from({ length: Math.max(head!.length, ...rows.map((row) => row.length)) }, (_, index) => index);
  return (
    <div class="table-scroll" tabIndex={0} role="group" aria-label="Table">
      <table>
        <thead>
          <tr>
            {columns.map((column) => (
              <th scope="col">{inline((head![column] ?? "").trim())}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr>
              {columns.map((column) => (
                <td>{inline((row[column] ?? "").trim())}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
