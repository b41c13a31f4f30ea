import { useId } from "preact/hooks";
import { Field, NumberSlider, Select, TextField } from "../ui/field";
import { seedProblem, settings, toolsProblem, useSettings, type Settings } from "./settings_store";

const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city now.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/** How to ask. Everything applies to the next answer. */
export function SettingsPanel(props: { longest: number | null }) {
  const value = useSettings();
  const set = (part: Partial<Settings>) => settings.change(part);
  const most = Math.min(props.longest ?? 8192, 32_768);
  return (
    <div class="stack">
      <Field label="System prompt">
        {(id) => (
          <textarea
            id={id}
            rows={3}
            value={value.system}
            placeholder="You are a helpful assistant."
            onInput={(event) => set({ system: event.currentTarget.value })}
          />
        )}
      </Field>
      <fieldset>
        <legend>Sampling</legend>
        <NumberSlider
          label="Temperature"
          {...{ min: 0, max: 2, step: 0.05, value: value.temperature }}
          note={value.temperature === 0 ? "always the likeliest" : undefined}
          onInput={(temperature) => set({ temperature })}
        />
        <NumberSlider
          label="Top-p"
          {...{ min: 0.01, max: 1, step: 0.01, value: value.topP }}
          note={value.topP === 1 ? "off" : undefined}
          onInput={(topP) => set({ topP })}
        />
        <NumberSlider
          label="Top-k"
          {...{ min: 0, max: 200, step: 1, value: value.topK }}
          note={value.topK === 0 ? "off" : undefined}
          onInput={(topK) => set({ topK: Math.round(topK) })}
        />
        <NumberSlider
          label="Min-p"
          {...{ min: 0, max: 0.5, step: 0.01, value: value.minP }}
          note={value.minP === 0 ? "off" : undefined}
          onInput={(minP) => set({ minP })}
        />
        <NumberSlider
          label="Longest answer"
          {...{ min: 1, max: most, step: 1, value: Math.min(value.maxTokens, most) }}
          note="tokens"
          onInput={(maxTokens) => set({ maxTokens: Math.round(maxTokens) })}
        />
        <TextField
          label="Seed"
          value={value.seed}
          hint={seedProblem(value.seed)}
          wrong={seedProblem(value.seed) !== ""}
          input={{ inputMode: "numeric", placeholder: "random" }}
          onInput={(seed) => set({ seed })}
        />
      </fieldset>
      <Check
        label="Token probabilities"
        hint="Colours every token of the next answer by how likely it was."
        value={value.probabilities}
        onChange={(probabilities) => set({ probabilities })}
      />
      <Tools value={value} set={set} />
    </div>
  );
}

function Tools(props: { value: Settings; set: (part: Partial<Settings>) => void }) {
  const { value, set } = props;
  const problem = toolsProblem(value.tools);
  return (
    <details class="tools-field">
      <summary>Tools{value.tools.trim() && !problem ? ` (${JSON.parse(value.tools).length})` : ""}</summary>
      <div class="stack">
        <Field label="Tools as a JSON list" hint={problem} wrong={problem !== ""}>
          {(id, hintId) => (
            <textarea
              id={id}
              class="code"
              rows={8}
              spellcheck={false}
              value={value.tools}
              aria-invalid={problem !== "" || undefined}
              aria-describedby={problem ? hintId : undefined}
              onInput={(event) => set({ tools: event.currentTarget.value })}
            />
          )}
        </Field>
        <Select
          label="Calls"
          value={value.toolChoice}
          options={[
            ["auto", "when the model wants to"],
            ["required", "always one"],
            ["none", "never"],
          ]}
          onChange={(choice) => set({ toolChoice: choice as Settings["toolChoice"] })}
        />
        <button type="button" class="button" onClick={() => set({ tools: JSON.stringify(EXAMPLE, null, 2) })}>
          Insert an example
        </button>
      </div>
    </details>
  );
}

function Check(props: { label: string; hint: string; value: boolean; onChange: (value: boolean) => void }) {
  const id = useId();
  return (
    <div class="switch">
      <input
        id={id}
        type="checkbox"
        checked={props.value}
        aria-describedby={`${id}-hint`}
        onChange={(event) => props.onChange(event.currentTarget.checked)}
      />
      <label for={id}>{props.label}</label>
      <span id={`${id}-hint`} class="small quiet">
        {props.hint}
      </span>
    </div>
  );
}
