import type { ComponentChildren, InputHTMLAttributes } from "preact";
import { useId, useState } from "preact/hooks";

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

interface Scale {
  label: string;
  value: number;
  min: number;
  max: number;
  step: number;
  onInput: (value: number) => void;
}

export function Slider(props: Scale & { text?: string }) {
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

/** A slider and, beside it, the number itself to type: it takes values between the slider's steps, and none beyond its
 * ends. `note` says what the number means where that is not plain. */
export function NumberSlider(props: Scale & { note?: string }) {
  const { label, value, min, max, step, onInput } = props;
  const [typed, setTyped] = useState<string | null>(null);
  const id = useId();
  const type = (text: string) => {
    setTyped(text);
    const given = Number(text);
    if (text.trim() && given >= min && given <= max) onInput(given);
  };
  const leave = () => {
    const given = Number(typed ?? value);
    if (typed?.trim() && !Number.isNaN(given)) onInput(Math.min(Math.max(given, min), max));
    setTyped(null);
  };
  return (
    <div class="field number-slider">
      <label for={id}>{label}</label>
      <span id={`${id}-note`} class="note small">
        {props.note}
      </span>
      <input
        type="range"
        aria-label={`${label}, slider`}
        aria-valuetext={props.note ? `${value}, ${props.note}` : undefined}
        {...{ min, max, step, value }}
        onInput={(event) => onInput(Number(event.currentTarget.value))}
      />
      <input
        id={id}
        type="number"
        aria-describedby={props.note ? `${id}-note` : undefined}
        {...{ min, max, step, value: typed ?? value }}
        onInput={(event) => type(event.currentTarget.value)}
        onBlur={leave}
        onKeyDown={(event) => event.key === "Enter" && leave()}
      />
    </div>
  );
}
