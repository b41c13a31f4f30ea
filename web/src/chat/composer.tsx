import { useLayoutEffect, useRef } from "preact/hooks";
import { conversation } from "./conversation";

/** Where the next message is written. What is in it is never lost: it leaves only when it is sent. */
export function Composer(props: { running: boolean; draft: string; editLast: () => void }) {
  const field = useRef<HTMLTextAreaElement>(null);
  useLayoutEffect(() => {
    if (matchMedia("(min-width: 60rem)").matches) field.current!.focus({ preventScroll: true });
  }, []);
  useLayoutEffect(() => {
    const element = field.current!;
    element.style.height = "auto";
    element.style.height = `${element.scrollHeight + 2}px`;
  }, [props.draft]);
  const write = (text: string) => {
    conversation.draft = text;
    conversation.changed();
  };
  const send = () => {
    const text = conversation.draft;
    if (!text.trim() || conversation.running) return;
    conversation.draft = "";
    conversation.send(text);
  };
  const pressed = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.altKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
    if (event.key === "ArrowUp" && !conversation.draft) {
      event.preventDefault();
      props.editLast();
    }
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      <textarea
        ref={field}
        id="composer"
        rows={1}
        aria-label="Message"
        placeholder="Write a message"
        value={props.draft}
        onInput={(event) => write(event.currentTarget.value)}
        onKeyDown={pressed}
      />
      {props.running ? (
        <button type="button" class="button" onClick={() => conversation.stop()}>
          Stop
        </button>
      ) : (
        <button class="button primary" disabled={!props.draft.trim()}>
          Send
        </button>
      )}
    </form>
  );
}
