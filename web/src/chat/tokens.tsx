import { Component } from "preact";
import { useRef, useState } from "preact/hooks";
import { percent } from "../format";
import type { Token } from "./turn";

/** From the likely to the surprising. Each level has an underline of its own beside its colour. */
const LEVELS = [
  { least: 0.9, text: "90 % and more" },
  { least: 0.5, text: "50–90 %" },
  { least: 0.2, text: "20–50 %" },
  { least: 0.05, text: "5–20 %" },
  { least: 0, text: "under 5 %" },
];

export function levelOf(logprob: number): number {
  const probability = Math.exp(logprob);
  return LEVELS.findIndex((level) => probability >= level.least);
}

/** Blanks and line ends made visible. */
const visible = (text: string): string => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

/** An answer token by token. One stop for the Tab key; arrows move between tokens. */
export function TokenView(props: { tokens: Token[] }) {
  const { tokens } = props;
  const [at, setAt] = useState<number | null>(null);
  const place = useRef<HTMLDivElement>(null);
  const indexOf = (event: Event): number | null => {
    const index = (event.target as HTMLElement).dataset.index;
    return index === undefined ? null : Number(index);
  };
  const move = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const from = indexOf(event);
    if (event.key === "Escape") setAt(null);
    if (step === undefined || from === null) return;
    event.preventDefault();
    place.current?.querySelector<HTMLElement>(`[data-index="${from + step}"]`)?.focus();
  };
  return (
    <div class="tokens">
      <p class="legend small quiet">
        <span>Probability of each token:</span>
        {LEVELS.map((level, index) => (
          <span key={index} class="tok" data-level={index}>
            {level.text}
          </span>
        ))}
      </p>
      <div
        ref={place}
        class="tokens-text"
        role="group"
        aria-label="Tokens of this answer. Arrow keys move between them."
        onMouseOver={(event) => setAt(indexOf(event) ?? at)}
        onMouseLeave={() => setAt(null)}
        onFocusIn={(event) => setAt(indexOf(event))}
        onFocusOut={() => setAt(null)}
        onKeyDown={move}
      >
        {linesOf(tokens).map(([start, stop]) => (
          <Line key={start} start={start} tokens={tokens.slice(start, stop)} />
        ))}
        {at !== null && tokens[at] && <Alternatives token={tokens[at]} index={at} place={place.current!} />}
      </div>
    </div>
  );
}

/** Where lines of text begin and end: each is a block, so that a token more lays out one line and not all. */
function linesOf(tokens: Token[]): [start: number, stop: number][] {
  const ends = tokens.flatMap((token, index) => (token.text.endsWith("\n") ? index + 1 : []));
  const starts = [0, ...ends].filter((start) => start < tokens.length);
  return starts.map((start, line) => [start, starts[line + 1] ?? tokens.length]);
}

/** Tokens do not change once they have come. */
class Line extends Component<{ start: number; tokens: Token[] }> {
  shouldComponentUpdate(next: { tokens: Token[] }): boolean {
    return next.tokens.length !== this.props.tokens.length;
  }

  render() {
    const spans = this.props.tokens.map((token, index) => (
      <span
        role="button"
        class="tok"
        data-index={this.props.start + index}
        data-level={levelOf(token.logprob)}
        tabIndex={this.props.start + index ? -1 : 0}
        aria-label={`${visible(token.text)}, ${percent(Math.exp(token.logprob))}`}
      >
        {token.text}
      </span>
    ));
    return <div>{spans}</div>;
  }
}

/** What else could have stood here, beside the token it belongs to. */
function Alternatives(props: { token: Token; index: number; place: HTMLElement }) {
  const { token, place } = props;
  const anchor = place.querySelector<HTMLElement>(`[data-index="${props.index}"]`);
  const box = anchor?.getClientRects()[0];
  const frame = place.getBoundingClientRect();
  const left = Math.max(0, Math.min((box?.left ?? 0) - frame.left, frame.width - 240));
  const top = (box?.bottom ?? 0) - frame.top + 4;
  const listed = token.top.some((other) => other.logprob === token.logprob && other.text === token.text);
  const rows = listed ? token.top : [...token.top, token];
  return (
    <div class="alternatives" role="tooltip" style={{ left: `${left}px`, top: `${top}px` }}>
      {rows.map((other, index) => {
        const chosen = other.text === token.text;
        return (
          <div key={index} class={chosen ? "alternative chosen" : "alternative"}>
            <span class="name">{visible(other.text)}</span>
            <span class="share">
              <span style={{ width: `${Math.exp(other.logprob) * 100}%` }} />
            </span>
            <span class="value">{percent(Math.exp(other.logprob))}</span>
          </div>
        );
      })}
    </div>
  );
}
