import { Component } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { millis, number } from "../format";
import { CopyButton } from "../ui/copy";
import { conversation } from "./conversation";
import { Markdown } from "./markdown";
import { TokenView } from "./tokens";
import { rateOf, type Call, type Turn } from "./turn";

interface Place {
  isLast: boolean;
  isRunning: boolean;
  editing: boolean;
  edit: (turn: Turn | null) => void;
  model: string;
}

type Props = Place & { turn: Turn; version: number; question: boolean };

/** A message is drawn when something of it has changed: of a long conversation, only the last one as it grows. */
export class Message extends Component<Props> {
  shouldComponentUpdate(next: Props): boolean {
    return (Object.keys(next) as (keyof Props)[]).some((name) => next[name] !== this.props[name]);
  }

  render() {
    return <Shown {...this.props} />;
  }
}

function Shown(props: Props) {
  const { turn } = props;
  if (turn.role === "user")
    return props.editing ? <Editor turn={turn} done={() => props.edit(null)} /> : <Question {...props} />;
  if (turn.role === "tool")
    return (
      <article class="turn tool" aria-label="Tool result">
        <h2>Tool result</h2>
        <pre tabIndex={0} aria-label="Result">{turn.text || "(empty)"}</pre>
      </article>
    );
  return <Answer {...props} />;
}

function Question(props: Place & { turn: Turn; question: boolean }) {
  return (
    <article class="turn question" aria-label="You">
      <h2 class="hidden-label">You</h2>
      <div class="bubble">{props.turn.text}</div>
      {props.question && !props.isRunning && (
        <div class="actions">
          <button type="button" class="link-button" onClick={() => props.edit(props.turn)}>
            Edit
          </button>
        </div>
      )}
    </article>
  );
}

/** The last question, in other words. */
function Editor(props: { turn: Turn; done: () => void }) {
  const [text, setText] = useState(props.turn.text);
  const field = useRef<HTMLTextAreaElement>(null);
  useLayoutEffect(() => {
    field.current!.focus();
    field.current!.setSelectionRange(text.length, text.length);
  }, []);
  const submit = () => {
    if (!text.trim()) return;
    props.done();
    conversation.resend(props.turn, text);
  };
  return (
    <form
      class="turn question editor"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      <textarea
        ref={field}
        aria-label="Edit your message"
        rows={Math.min(12, text.split("\n").length + 1)}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            submit();
          }
          if (event.key === "Escape") {
            event.stopPropagation();
            props.done();
          }
        }}
      />
      <div class="row">
        <button class="button primary" disabled={!text.trim()}>
          Send again
        </button>
        <button type="button" class="button" onClick={props.done}>
          Cancel
        </button>
      </div>
    </form>
  );
}

function Answer(props: Place & { turn: Turn }) {
  const { turn } = props;
  const [plain, setPlain] = useState(false);
  const streams = props.isLast && props.isRunning;
  const byToken = turn.tokens.length > 0 && !plain;
  return (
    <article class="turn answer" aria-label="Answer" aria-busy={streams}>
      <h2>{props.model}</h2>
      {turn.reasoning && <Reasoning turn={turn} streams={streams} />}
      {byToken ? <TokenView tokens={turn.tokens} /> : turn.text && <Markdown text={turn.text} />}
      {streams && !turn.text && !turn.calls.length && !turn.reasoning && <p class="waiting">Waiting for the first token</p>}
      {turn.calls.map((call, index) => (
        <CallView key={index} call={call} turn={turn} open={props.isLast && !streams} />
      ))}
      {turn.calls.length > 0 && props.isLast && !streams && !turn.error && (
        <button type="button" class="button primary" onClick={() => conversation.giveResults(turn)}>
          Give back {turn.calls.length > 1 ? "results" : "the result"}
        </button>
      )}
      {turn.error && (
        <div class="told" role="alert">
          <p>{turn.error}</p>
        </div>
      )}
      <footer class="actions">
        {!streams && turn.text && <CopyButton text={turn.text} what="the answer" />}
        {!streams && props.isLast && (
          <button type="button" class="button" onClick={() => conversation.regenerate()}>
            {turn.error && !turn.text ? "Try again" : "Regenerate"}
          </button>
        )}
        {turn.tokens.length > 0 && (
          <button type="button" class="button" aria-pressed={!plain} onClick={() => setPlain(!plain)}>
            Probabilities
          </button>
        )}
        <Stats turn={turn} streams={streams} />
      </footer>
    </article>
  );
}

function Reasoning(props: { turn: Turn; streams: boolean }) {
  const thinking = props.streams && !props.turn.text && !props.turn.calls.length;
  return (
    <details class="reasoning">
      <summary>{thinking ? "Thinking…" : "Thought"}</summary>
      <div class="text">{props.turn.reasoning}</div>
    </details>
  );
}

function CallView(props: { call: Call; turn: Turn; open: boolean }) {
  const { call } = props;
  return (
    <section class="call" aria-label={`Call of ${call.name}`}>
      <h3>
        <span class="tag">tool call</span> <code>{call.name}</code>
      </h3>
      <pre tabIndex={0} aria-label="Arguments">{pretty(call.arguments)}</pre>
      {props.open && (
        <label class="field">
          <span class="label">Result of {call.name}</span>
          <textarea
            rows={2}
            value={call.result}
            placeholder='{"temperature": 21}'
            onInput={(event) => {
              call.result = event.currentTarget.value;
              conversation.changed(props.turn);
            }}
          />
        </label>
      )}
    </section>
  );
}

/** JSON with its lines; what is not whole yet, as it is. */
function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** What this answer took, as seen from here. */
function Stats(props: { turn: Turn; streams: boolean }) {
  const { turn, streams } = props;
  if (!turn.firstAt) return <p class="stats">{turn.finish === "stopped" ? "stopped" : " "}</p>;
  const rate = rateOf(turn);
  return (
    <p class="stats">
      <span title="Time to first token, measured in this page">TTFT {millis(turn.firstAt - turn.sentAt)}</span>
      {rate !== null && (
        <span class={streams ? "rate now" : "rate"} title="Tokens a second since the first one">
          {number(rate)} tok/s
        </span>
      )}
      {turn.usage && (
        <>
          <span>{number(turn.usage.output, 6)} tokens</span>
          <span>
            prompt {number(turn.usage.prompt, 6)}, cached {number(turn.usage.cached, 6)}
          </span>
        </>
      )}
      {turn.finish === "length" && <span class="tag warn">cut at the token limit</span>}
      {turn.finish === "stopped" && <span class="tag">stopped</span>}
      {streams && <span class="tag good">streaming</span>}
    </p>
  );
}
