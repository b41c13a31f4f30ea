import { useRef, useState } from "preact/hooks";
import { Field } from "./field";

export interface Choice {
  value: string;
  detail?: string;
}

/** A text field that offers what matches it. What is typed counts as it is; arrows and Enter take an offer. */
export function Combobox(props: {
  label: string;
  value: string;
  choices: readonly Choice[];
  onInput: (value: string) => void;
  hint?: string;
  wrong?: boolean;
}) {
  const [open, setOpen] = useState(false);
  const [typed, setTyped] = useState(false);
  const [at, setAt] = useState(-1);
  const list = useRef<HTMLUListElement>(null);
  const wanted = typed ? props.value.trim().toLowerCase() : "";
  const offered = props.choices.filter((choice) => choice.value.toLowerCase().includes(wanted));
  const shown = open && offered.length > 0;

  const close = () => {
    setOpen(false);
    setTyped(false);
    setAt(-1);
  };
  const take = (choice: Choice) => {
    props.onInput(choice.value);
    close();
  };
  const move = (to: number) => {
    const next = (to + offered.length) % offered.length;
    setOpen(true);
    setAt(next);
    list.current?.children[next]?.scrollIntoView({ block: "nearest" });
  };
  const pressed = (event: KeyboardEvent) => {
    if (event.key === "ArrowDown" && offered.length) move(at + 1);
    else if (event.key === "ArrowUp" && offered.length) move(at < 0 ? offered.length - 1 : at - 1);
    else if (event.key === "Enter" && shown && offered[at]) take(offered[at]);
    else if (event.key === "Escape" && open) close();
    else return;
    event.preventDefault();
  };

  return (
    <Field label={props.label} hint={props.hint} wrong={props.wrong}>
      {(id, hintId) => (
        <div class="combobox">
          <input
            id={id}
            role="combobox"
            value={props.value}
            spellcheck={false}
            autocomplete="off"
            autocapitalize="off"
            aria-expanded={shown}
            aria-controls={`${id}-list`}
            aria-autocomplete="list"
            aria-activedescendant={shown && at >= 0 ? `${id}-${at}` : undefined}
            aria-invalid={props.wrong || undefined}
            aria-describedby={props.hint ? hintId : undefined}
            onInput={(event) => {
              props.onInput(event.currentTarget.value);
              setOpen(true);
              setTyped(true);
              setAt(-1);
            }}
            onClick={() => setOpen(true)}
            onKeyDown={pressed}
            onBlur={close}
          />
          <ul id={`${id}-list`} ref={list} role="listbox" aria-label={`${props.label}: choices`} hidden={!shown}>
            {offered.map((choice, index) => (
              <li
                key={choice.value}
                id={`${id}-${index}`}
                role="option"
                aria-selected={index === at}
                onMouseDown={(event) => {
                  event.preventDefault();
                  take(choice);
                }}
              >
                <span>{choice.value}</span>
                {choice.detail !== undefined && <span class="detail">{choice.detail}</span>}
              </li>
            ))}
          </ul>
        </div>
      )}
    </Field>
  );
}
