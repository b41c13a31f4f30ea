import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { conversation, type Conversation } from "./conversation";
import { library, useLibrary, type Heading, type Saved } from "./library";
import { messagesOf } from "./turn";

const DAY_MS = 86_400_000;
const time = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const date = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const when = (at: number) => (Date.now() - at < DAY_MS ? time : date).format(at);

/** The conversations this browser keeps. What can be done with one stands below the one that is open. */
export function SavedList(props: { chat: Conversation; startAnew: () => void; opened: () => void }) {
  const { chat } = props;
  const { headings } = useLibrary();
  const [removed, setRemoved] = useState<Saved | null>(null);
  const open = (id: string) => {
    if (id !== chat.id) chat.open(id);
    props.opened();
  };
  const bringBack = () => {
    library.save(removed!);
    chat.open(removed!.id);
    setRemoved(null);
  };
  return (
    <>
      <button type="button" class="button new-chat" disabled={!chat.turns.length} onClick={props.startAnew}>
        New conversation
      </button>
      <ul>
        {headings.map((heading) => (
          <li key={heading.id} class={heading.id === chat.id ? "saved open" : "saved"}>
            {heading.id === chat.id ? (
              <Opened heading={heading} open={() => open(heading.id)} remove={() => setRemoved(chat.remove())} />
            ) : (
              <Title heading={heading} open={() => open(heading.id)} />
            )}
          </li>
        ))}
      </ul>
      <div class="small quiet" aria-live="polite">
        {removed !== null && (
          <p>
            Deleted.{" "}
            <button type="button" class="link-button" onClick={bringBack}>
              Undo
            </button>
          </p>
        )}
        {chat.unkept && <p>There is no room in this browser to keep this conversation.</p>}
      </div>
      <p class="small quiet">Kept in this browser alone, the latest fifty.</p>
    </>
  );
}

function Title(props: { heading: Heading; current?: boolean; open: () => void }) {
  const { heading } = props;
  return (
    <button type="button" class="saved-title" aria-current={props.current ? "true" : undefined} onClick={props.open}>
      <span>{heading.title}</span> <time class="quiet">{when(heading.changed)}</time>
    </button>
  );
}

function Opened(props: { heading: Heading; open: () => void; remove: () => void }) {
  const { heading } = props;
  const [renames, setRenames] = useState(false);
  const action = (text: string, does: () => void) => (
    <button type="button" class="link-button" onClick={does}>
      {text}
    </button>
  );
  if (renames) return <Rename title={heading.title} done={() => setRenames(false)} />;
  const name = heading.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
  return (
    <>
      <Title heading={heading} current open={props.open} />
      <div class="saved-actions">
        {action("Rename", () => setRenames(true))}
        {action("Markdown", () => download(`${name}.md`, "text/markdown", asMarkdown(conversation.saved())))}
        {action("JSON", () => download(`${name}.json`, "application/json", asJson(conversation.saved())))}
        {action("Delete", props.remove)}
      </div>
    </>
  );
}

function Rename(props: { title: string; done: () => void }) {
  const [title, setTitle] = useState(props.title);
  const field = useRef<HTMLInputElement>(null);
  useLayoutEffect(() => field.current!.select(), []);
  const over = useRef(false);
  /** A field that goes away is left, too: what counts is what came first. */
  const end = (renamed: boolean) => {
    if (over.current) return;
    over.current = true;
    if (renamed) conversation.rename(title);
    props.done();
  };
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        end(true);
      }}
    >
      <input
        ref={field}
        aria-label="Title"
        value={title}
        maxLength={60}
        onInput={(event) => setTitle(event.currentTarget.value)}
        onBlur={() => end(true)}
        onKeyDown={(event) => {
          if (event.key !== "Escape") return;
          event.stopPropagation();
          end(false);
        }}
      />
    </form>
  );
}

function download(name: string, type: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}

const system = (saved: Saved) => (saved.system.trim() ? [{ role: "system", content: saved.system }] : []);

/** As the API takes it: `messages` can be sent again. */
function asJson(saved: Saved): string {
  const messages = [...system(saved), ...messagesOf(saved.turns)];
  return `${JSON.stringify({ title: saved.title, model: saved.model, messages }, null, 2)}\n`;
}

function asMarkdown(saved: Saved): string {
  const speaker = { user: "You", assistant: saved.model, tool: "Tool" };
  const said = (turn: Saved["turns"][number]) =>
    [turn.text, ...turn.calls.map((call) => `\`${call.name}(${call.arguments})\``)].filter(Boolean).join("\n\n");
  const parts = [
    ...system(saved).map(({ content }) => `**System**\n\n${content}`),
    ...saved.turns.map((turn) => `**${speaker[turn.role]}**\n\n${said(turn)}`),
  ];
  return [`# ${saved.title}`, ...parts].join("\n\n") + "\n";
}
