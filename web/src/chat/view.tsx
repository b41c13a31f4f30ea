import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { get } from "../api";
import { number } from "../format";
import type { About } from "../session";
import "../styles/chat.css";
import { Composer } from "./composer";
import { useConversation } from "./conversation";
import { Message } from "./message";
import { SettingsPanel } from "./settings";
import { SavedList } from "./saved";
import { settings } from "./settings_store";
import type { Turn } from "./turn";

const NEAR_THE_END = 48;
const FIRST_WORDS = [
  "What is tensor parallelism, in three sentences?",
  "Write a Python function that merges two sorted lists.",
  "Which is larger, 9.11 or 9.9?",
];
const SHORTCUTS = [
  ["Enter", "send"],
  ["Shift + Enter", "new line"],
  ["Esc", "stop the answer"],
  ["↑ in an empty field", "edit the last message"],
  ["Alt + R", "regenerate the answer"],
  ["Alt + N", "new conversation"],
  ["Alt + P", "token probabilities on or off"],
  ["Alt + S", "to the settings"],
  ["Alt + C", "to the conversations"],
] as const;

const PANES = { saved: "Conversations", settings: "Settings" } as const;

export function ChatView(props: { server: About }) {
  const model = props.server.model ?? "";
  const chat = useConversation();
  const [editing, setEditing] = useState<Turn | null>(null);
  const [shows, setShows] = useState<"" | "settings" | "saved">("");
  const longest = useLongest(model);
  const running = chat.running !== null;
  useEffect(() => settings.change({ model }), [model]);
  useEffect(() => setEditing(null), [chat.id]);
  const startAnew = () => {
    chat.clear();
    setShows("");
    document.getElementById("composer")?.focus();
  };
  const toSettings = () => {
    setShows("settings");
    requestAnimationFrame(() => document.querySelector<HTMLElement>(".chat-settings textarea")?.focus());
  };
  const toSaved = () => {
    setShows("saved");
    requestAnimationFrame(() => document.querySelector<HTMLElement>(".chat-saved li button")?.focus());
  };
  const toggleProbabilities = () => settings.change({ probabilities: !settings.value.probabilities });
  useShortcuts(
    { KeyR: () => chat.regenerate(), KeyN: startAnew, KeyP: toggleProbabilities, KeyS: toSettings, KeyC: toSaved },
    () => chat.stop(),
  );
  const panel = useMemo(() => <SettingsPanel longest={longest} />, [longest]);
  const used = chat.turns.findLast((turn) => turn.usage)?.usage;
  return (
    <div class={shows ? `chat shows-${shows}` : "chat"}>
      <nav class="chat-saved" aria-label="Conversations">
        <SavedList chat={chat} startAnew={startAnew} opened={() => setShows("")} />
      </nav>
      <section class="chat-main" aria-label="Conversation">
        {chat.turns.length === 0 ? (
          <Welcome model={model} longest={longest} send={(text) => chat.send(text)} />
        ) : (
          <Log turns={chat.turns} running={running} editing={editing} edit={setEditing} model={model} />
        )}
        <div class="chat-foot">
          <Composer
            running={running}
            draft={chat.draft}
            editLast={() => !running && chat.lastQuestion && setEditing(chat.lastQuestion)}
          />
          <div class="chat-tools small quiet">
            {(["saved", "settings"] as const).map((pane) => (
              <button
                key={pane}
                type="button"
                class={`link-button ${pane}-button`}
                aria-expanded={shows === pane}
                onClick={() => setShows(shows === pane ? "" : pane)}
              >
                {shows === pane ? `Close ${PANES[pane].toLowerCase()}` : PANES[pane]}
              </button>
            ))}
            <button type="button" class="link-button new-button" disabled={!chat.turns.length} onClick={startAnew}>
              New conversation
            </button>
            <Shortcuts />
            <span class="context">
              {used && longest ? `${number(used.prompt + used.output, 6)} of ${number(longest, 6)} tokens of context` : ""}
            </span>
          </div>
        </div>
      </section>
      <aside class="chat-settings card" aria-label="Settings">
        {panel}
      </aside>
      <p class="hidden-label" role="status">
        {running ? "Answering" : chat.last?.finish ? "The answer is complete" : ""}
      </p>
    </div>
  );
}

function useLongest(model: string): number | null {
  const [longest, setLongest] = useState<number | null>(null);
  useEffect(() => {
    get<{ data: { id: string; max_model_len?: number | null }[] }>("v1/models")
      .then((models) => setLongest(models.data.find((each) => each.id === model)?.max_model_len ?? null))
      .catch(() => undefined);
  }, [model]);
  return longest;
}

function useShortcuts(withAlt: Record<string, () => void>, escape: () => void): void {
  const latest = useRef({ withAlt, escape });
  latest.current = { withAlt, escape };
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (event.key === "Escape") latest.current.escape();
      const action = event.altKey && !event.ctrlKey && !event.metaKey && latest.current.withAlt[event.code];
      if (!action) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

function Welcome(props: { model: string; longest: number | null; send: (text: string) => void }) {
  return (
    <div class="welcome">
      <h2>{props.model}</h2>
      <p class="quiet">
        {props.longest ? `${number(props.longest, 6)} tokens of context. ` : ""}Conversations stay in
        this browser.
      </p>
      <ul>
        {FIRST_WORDS.map((text) => (
          <li key={text}>
            <button type="button" class="button" onClick={() => props.send(text)}>
              {text}
            </button>
          </li>
        ))}
      </ul>
    </div>
  );
}

/** The messages. Follows the answer as it grows, unless the reader has scrolled away. */
function Log(props: {
  turns: Turn[];
  running: boolean;
  editing: Turn | null;
  edit: (turn: Turn | null) => void;
  model: string;
}) {
  const log = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const [away, setAway] = useState(false);
  const toEnd = () => log.current?.scrollTo({ top: log.current.scrollHeight });
  const scrolled = () => {
    const element = log.current!;
    follows.current = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_THE_END;
    setAway(!follows.current);
  };
  const count = props.turns.length;
  useLayoutEffect(() => {
    follows.current = true;
  }, [count]);
  useLayoutEffect(() => {
    if (follows.current) toEnd();
  });
  const question = props.turns.findLast((turn) => turn.role === "user");
  return (
    <div class="log-frame">
      <div class="log" ref={log} onScroll={scrolled} tabIndex={0} role="log" aria-live="off" aria-label="Messages">
        {props.turns.map((turn, index) => (
          <Message
            key={turn.key}
            turn={turn}
            version={turn.version}
            question={turn === question}
            isLast={index === count - 1}
            isRunning={props.running}
            editing={props.editing === turn}
            edit={props.edit}
            model={props.model}
          />
        ))}
      </div>
      {away && (
        <button
          type="button"
          class="button to-end"
          onClick={() => {
            follows.current = true;
            toEnd();
          }}
        >
          ↓ Latest
        </button>
      )}
    </div>
  );
}

function Shortcuts() {
  return (
    <details class="shortcuts">
      <summary>Shortcuts</summary>
      <dl>
        {SHORTCUTS.map(([keys, what]) => (
          <div key={keys}>
            <dt>
              <kbd>{keys}</kbd>
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
    </details>
  );
}
