import type { ComponentChild } from "preact";

const DEEPEST = 6;
const LONGEST_LINK = 2000;
const MARK = /`+|\*\*|__|[*_]/y;
const ADDRESS = /https?:\/\/[^\s<>()[\]"'`*|]+/y;
const ESCAPABLE = /[!-/:-@[-`{-~]/;

/** Text with code, emphasis and links. A mark without its end is text, and its end is looked for once. */
export function inline(text: string, depth = 0): ComponentChild[] {
  if (depth > DEEPEST) return [text];
  const out: ComponentChild[] = [];
  const unclosed = new Set<string>();
  let plain = "";
  for (let at = 0; at < text.length; ) {
    const found = spanAt(text, at, unclosed, depth) ?? linkAt(text, at);
    if (found) {
      if (plain) out.push(plain);
      plain = "";
      out.push(found.node);
      at = found.end;
    } else {
      const taken = text[at] === "`" ? runAt(text, at) : text[at]!;
      const escapes = taken === "\\" && ESCAPABLE.test(text[at + 1] ?? "");
      plain += escapes ? text[at + 1] : taken;
      at += escapes ? 2 : taken.length;
    }
  }
  return plain ? [...out, plain] : out;
}

interface Found {
  node: ComponentChild;
  end: number;
}

function runAt(text: string, at: number): string {
  MARK.lastIndex = at;
  return MARK.exec(text)?.[0] ?? "";
}

function spanAt(text: string, at: number, unclosed: Set<string>, depth: number): Found | null {
  const mark = runAt(text, at);
  if (!mark || unclosed.has(mark) || !opens(text, at, mark)) return null;
  const end = closing(text, at + mark.length, mark);
  if (end < 0) {
    unclosed.add(mark);
    return null;
  }
  const inner = text.slice(at + mark.length, end);
  return { node: spanned(mark, inner, depth), end: end + mark.length };
}

function opens(text: string, at: number, mark: string): boolean {
  if (mark[0] === "`") return true;
  const inWord = mark[0] === "_" && /[\p{L}\p{N}_]/u.test(text[at - 1] ?? "");
  return !inWord && /\S/.test(text[at + mark.length] ?? "");
}

/** Where a mark's end is. Whether a place is one does not depend on where the mark began. */
function closing(text: string, from: number, mark: string): number {
  const sign = mark[0]!;
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at + 1)) {
    while (mark === "**" && text[at + 2] === "*") at++;
    const alone = text[at - 1] !== sign && text[at + mark.length] !== sign;
    if (sign === "`" ? alone : at > from && closes(text, at, mark) && (mark.length > 1 || alone)) return at;
  }
  return -1;
}

function closes(text: string, at: number, mark: string): boolean {
  const inWord = mark[0] === "_" && /[\p{L}\p{N}]/u.test(text[at + mark.length] ?? "");
  return !inWord && /\S/.test(text[at - 1] ?? "");
}

function spanned(mark: string, inner: string, depth: number): ComponentChild {
  const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  if (mark[0] === "`") return <code>{padded ? inner.slice(1, -1) : inner}</code>;
  return mark.length === 2 ? <strong>{inline(inner, depth + 1)}</strong> : <em>{inline(inner, depth + 1)}</em>;
}

/** `[text](https://…)` or a bare address. Only http and https lead anywhere, and where to is in sight. */
function linkAt(text: string, at: number): Found | null {
  if (text[at] === "[") return writtenLink(text.slice(at, at + LONGEST_LINK), at);
  if (text[at] !== "h" || /\w/.test(text[at - 1] ?? "")) return null;
  ADDRESS.lastIndex = at;
  const bare = ADDRESS.exec(text)?.[0].replace(/[.,;:!?]+$/, "");
  const url = bare && httpUrl(bare);
  return url ? { node: <Link url={url} label={bare} />, end: at + bare.length } : null;
}

function writtenLink(text: string, at: number): Found | null {
  const middle = text.indexOf("](");
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0) return null;
  const url = httpUrl(text.slice(middle + 2, end).trim().split(/\s/, 1)[0]!);
  return url && { node: <Link url={url} label={text.slice(1, middle)} />, end: at + end + 1 };
}

function httpUrl(text: string): URL | null {
  const url = URL.canParse(text) ? new URL(text) : null;
  return url && (url.protocol === "https:" || url.protocol === "http:") ? url : null;
}

function Link(props: { url: URL; label: string }) {
  const { url, label } = props;
  const shown = label === url.href || label === url.href.replace(/\/$/, "");
  return (
    <>
      <a href={url.href} target="_blank" rel="noopener noreferrer">
        {label || url.href}
      </a>
      {!shown && <span class="md-address"> ({url.href})</span>}
    </>
  );
}
