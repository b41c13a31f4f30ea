import type { ComponentChildren, InputHTMLAttributes } from "preact";
import { useId } from "preact/hooks";

/** A label above a control. `hint` keeps its line even when empty, so that nothing moves when it comes. */
export function Field(props: {
  label: string;
  hint?: string;
  wrong?: boolean;
  children: (id: string, hintId: string) => ComponentChildren;
}) {
  const id = useId();
  const hintId = `${id}-hint`;
  return (
    <div class="field">
      <label for={id}>{props.label}</label>
      {props.children(id, hintId)}
      {props.hint !== undefined && (
        <span id={hintId} class={props.wrong ? "hint wrong" : "hint"}>
          {props.hint}
        </span>
      )}
    </div>
  );
}

export function Select(props: {
  label: string;
  value: string;
  options: readonly (readonly [value: string, text: string])[];
  onChange: (value: string) => void;
  hint?: string;
}) {
  return (
    <Field label={props.label} hint={props.hint}>
      {(id, hintId) => (
        <select
          id={id}
          value={props.value}
          aria-describedby={props.hint ? hintId : undefined}
          onChange={(event) => props.onChange(event.currentTarget.value)}
        >
          {props.options.map(([value, text]) => (
            <option key={value} value={value}>
              {text}
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}

export function TextField(props: {
  label: string;
  value: string;
  onInput: (value: string) => void;
  hint?: string;
  wrong?: boolean;
  input?: InputHTMLAttributes<HTMLInputElement>;
}) {
  return (
    <Field label={props.label} hint={props.hint} wrong={props.wrong}>
      {(id, hintId) => (
        <input
          id={id}
          value={props.value}
          spellcheck={false}
          autocomplete="off"
          aria-invalid={props.wrong || undefined}
          aria-describedby={props.hint ? hintId : undefined}
          onInput={(event) => props.onInput(event.currentTarget.value)}
          {...props.input}
        />
      )}
    </Field>
  );
}

export function Slider(props: {
  label: string;
  value: number;
  min: number;
  max: number;
  step: number;
  onInput: (value: number) => void;
  text?: string;
}) {
  return (
    <Field label={`${props.label}: ${props.text ?? props.value}`}>
      {(id) => (
        <input
          id={id}
          type="range"
          min={props.min}
          max={props.max}
          step={props.step}
          value={props.value}
          aria-valuetext={props.text}
          onInput={(event) => props.onInput(Number(event.currentTarget.value))}
        />
      )}
    </Field>
  );
}
