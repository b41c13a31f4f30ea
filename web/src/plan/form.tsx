import type { ComponentChildren } from "preact";
import { number, parameters } from "../format";
import { Combobox } from "../ui/combobox";
import { Select, TextField } from "../ui/field";
import { degrees, longest, machineOf, partsOf, type Part, type Question, type Wrong } from "./question";
import type { Catalog, Gpu } from "./types";

const LINKS: Record<string, string> = {
  nvswitch: "NVSwitch",
  "nvlink-bridge": "NVLink bridge",
  mesh: "mesh",
  pcie: "PCIe",
  roce: "RoCE network",
};
const MOST_LOG = 10;

interface Parts {
  question: Question;
  catalog: Catalog;
  wrong: Wrong;
  change: (more: Partial<Question>) => void;
}

/** Everything that can be asked. Every change asks anew. */
export function PlanForm(props: Parts) {
  return (
    <form class="plan-form" aria-label="Question" onSubmit={(event) => event.preventDefault()}>
      <Group title="Machine">
        <MachineFields {...props} />
      </Group>
      <Group title="Model">
        <ModelFields {...props} />
      </Group>
      <Group title="Traffic">
        <TrafficFields {...props} />
      </Group>
      <Group title="Goals and prices">
        <GoalFields {...props} />
      </Group>
    </form>
  );
}

function Group(props: { title: string; children: ComponentChildren }) {
  return (
    <fieldset>
      <legend>{props.title}</legend>
      {props.children}
    </fieldset>
  );
}

function MachineFields({ question, catalog, wrong, change }: Parts) {
  const [first = { count: 1, gpu: "" }, second] = partsOf(question.machine);
  const known = (name: string) => catalog.gpus.find((gpu) => gpu.name === name);
  const set = (parts: (Part | undefined)[]) =>
    change({ machine: machineOf(parts.filter((part) => part !== undefined && part.gpu !== "") as Part[]) });
  const kinds = catalog.gpus.map((gpu) => [gpu.name, `${gpu.name} · ${number(gpu.memory_gib)} GiB`] as const);
  const unknown = known(first.gpu) ? [] : ([[first.gpu, first.gpu || "–"]] as const);
  return (
    <>
      <Combobox
        label="Machine"
        value={question.machine}
        choices={catalog.machines.map((value) => ({ value }))}
        onInput={(machine) => change({ machine })}
        hint={wrong.machine ?? fabric(partsOf(question.machine), known)}
        wrong={wrong.machine !== undefined}
      />
      <div class="pair">
        <Select
          label="System"
          value={question.os}
          options={catalog.systems.map((each) => [each.name, each.title] as const)}
          onChange={(os) => change({ os })}
        />
        <Select
          label="Between boxes"
          value={question.network}
          options={[["", "usual"], ...catalog.networks.map((name) => [name, name] as const)]}
          onChange={(network) => change({ network })}
        />
      </div>
      <p class="hint">{catalog.systems.find((each) => each.name === question.os)?.note}</p>
      <div class="count-and-kind">
        <Count label="GPUs" value={first.count} onInput={(count) => set([{ ...first, count }, second])} />
        <Select
          label="Kind"
          value={first.gpu}
          options={[...unknown, ...kinds]}
          onChange={(gpu) => set([{ ...first, gpu }, second])}
        />
        <Count
          label="Mix in"
          value={second?.count ?? 0}
          onInput={(count) => set([first, count > 0 ? { count, gpu: second?.gpu ?? first.gpu } : undefined])}
        />
        <Select
          label="Other kind"
          value={second?.gpu ?? ""}
          options={[["", "none"], ...kinds]}
          onChange={(gpu) => set([first, gpu ? { count: second?.count || 1, gpu } : undefined])}
        />
      </div>
    </>
  );
}

function Count(props: { label: string; value: number; onInput: (value: number) => void }) {
  return (
    <TextField
      label={props.label}
      value={String(props.value)}
      onInput={(text) => props.onInput(Math.max(0, Math.trunc(Number(text)) || 0))}
      input={{ type: "number", min: 0, max: 64, inputMode: "numeric" }}
    />
  );
}

/** How the cards reach each other, as far as they are known. */
function fabric(parts: Part[], known: (name: string) => Gpu | undefined): string {
  const kinds = parts.map((part) => known(part.gpu));
  if (kinds.some((gpu) => gpu === undefined)) return "";
  const gpus = kinds as Gpu[];
  const count = parts.reduce((sum, part) => sum + part.count, 0);
  const [first] = gpus as [Gpu];
  if (count === 1) return "One GPU: no fabric.";
  if (gpus.length === 1 && count <= first.link_gpus) return `${LINKS[first.link]}, ${number(first.link_gbs)} GB/s a GPU.`;
  const slowest = gpus.reduce((slow, gpu) => (gpu.beyond_gbs < slow.beyond_gbs ? gpu : slow));
  const why = gpus.length > 1 ? "Unlike cards meet over" : first.link_gpus > 1 ? `Beyond ${first.link_gpus} GPUs:` : "";
  return `${why} ${LINKS[slowest.beyond]}, ${number(slowest.beyond_gbs)} GB/s a GPU.`.trim();
}

function ModelFields({ question, catalog, wrong, change }: Parts) {
  const model = catalog.models.find((each) => each.name === question.model);
  const engine = catalog.engines.find((each) => each.name === question.engine);
  const formats = engine?.formats ?? [...new Set(catalog.engines.flatMap((each) => each.formats))];
  const kvFormats = engine?.kv_formats ?? [...new Set(catalog.engines.flatMap((each) => each.kv_formats))];
  return (
    <>
      <Combobox
        label="Model"
        value={question.model}
        choices={catalog.models.map((each) => ({ value: each.name, detail: parameters(each.parameters) }))}
        onInput={(chosen) => change({ model: chosen })}
        hint={wrong.model ?? (model ? describe(model) : "")}
        wrong={wrong.model !== undefined}
      />
      <Select
        label="Runtime"
        value={question.engine}
        options={[
          ...catalog.engines.map((each) => [each.name, `${each.title} ${each.version}`.trim()] as const),
          ["", "The best of all"],
        ]}
        onChange={(name) => change({ engine: name })}
        hint={wrong.engine}
      />
      <div class="three">
        <Select
          label="Weights"
          value={question.format}
          options={[["", "automatic"], ...withOdd(formats, question.format)]}
          onChange={(format) => change({ format })}
          hint={wrong.format}
        />
        <Select
          label="TP"
          value={question.tp}
          options={[["", "compare all"], ...withOdd(degrees(question.machine).map(String), question.tp)]}
          onChange={(tp) => change({ tp })}
          hint={wrong.tp}
        />
        <Select
          label="KV cache"
          value={question.kv}
          options={withOdd(kvFormats, question.kv)}
          onChange={(kv) => change({ kv })}
          hint={wrong.kv}
        />
      </div>
    </>
  );
}

/** A choice that is made stays on the list, even where this runtime does not have it. */
function withOdd(names: string[], chosen: string): [string, string][] {
  const all = chosen && !names.includes(chosen) ? [...names, chosen] : names;
  return all.map((name) => [name, name]);
}

function describe(model: Catalog["models"][number]): string {
  const active = model.active_parameters < model.parameters ? `, ${parameters(model.active_parameters)} active` : "";
  return `${parameters(model.parameters)}${active}, ${model.format}, up to ${model.max_positions.toLocaleString("en-US")} tokens.`;
}

function TrafficFields({ question, wrong, change }: Parts) {
  const reached = longest(question);
  const numeric = { inputMode: "numeric" } as const;
  return (
    <>
      <div class="pair">
        <TextField
          label="Input tokens"
          value={question.input}
          onInput={(input) => change({ input })}
          hint={wrong.input}
          wrong={wrong.input !== undefined}
          input={numeric}
        />
        <TextField
          label="Output tokens"
          value={question.output}
          onInput={(output) => change({ output })}
          hint={wrong.output}
          wrong={wrong.output !== undefined}
          input={numeric}
        />
      </div>
      <div class="pair">
        <TextField
          label="Longest context"
          value={question.context}
          onInput={(context) => change({ context })}
          hint={wrong.context}
          wrong={wrong.context !== undefined}
          input={{ ...numeric, placeholder: Number.isFinite(reached) ? String(reached) : "" }}
        />
        <TextField
          label="Requests at once"
          value={question.concurrency}
          onInput={(concurrency) => change({ concurrency })}
          hint={wrong.concurrency}
          wrong={wrong.concurrency !== undefined}
          input={numeric}
        />
      </div>
      <div class="three">
        <TextField
          label="Requests/s"
          value={question.rate}
          onInput={(rate) => change({ rate })}
          hint={wrong.rate}
          wrong={wrong.rate !== undefined}
          input={{ inputMode: "decimal", placeholder: "closed loop" }}
        />
        <TextField
          label="Shared prefix"
          value={question.prefix}
          onInput={(prefix) => change({ prefix })}
          hint={wrong.prefix}
          wrong={wrong.prefix !== undefined}
          input={numeric}
        />
        <TextField
          label="Agents"
          value={question.agents}
          onInput={(agents) => change({ agents })}
          hint={wrong.agents}
          wrong={wrong.agents !== undefined}
          input={numeric}
        />
      </div>
      <input
        type="range"
        aria-label="Requests at once, in powers of two"
        aria-valuetext={question.concurrency}
        min={0}
        max={MOST_LOG}
        step={1}
        value={Math.round(Math.log2(Number(question.concurrency) || 1))}
        onInput={(event) => change({ concurrency: String(2 ** Number(event.currentTarget.value)) })}
      />
    </>
  );
}

function GoalFields({ question, wrong, change }: Parts) {
  return (
    <>
      <div class="pair">
        {(["ttft", "tpot"] as const).map((name) => (
          <TextField
            key={name}
            label={`${name.toUpperCase()} at most, ms`}
            value={question[name]}
            onInput={(value) => change({ [name]: value })}
            hint={wrong[name]}
            wrong={wrong[name] !== undefined}
            input={{ inputMode: "decimal", placeholder: "any" }}
          />
        ))}
      </div>
      <div class="pair">
        <TextField
          label="USD a kWh"
          value={question.kwh}
          onInput={(kwh) => change({ kwh })}
          hint={wrong.kwh}
          wrong={wrong.kwh !== undefined}
          input={{ inputMode: "decimal" }}
        />
        <TextField
          label="Years to write off"
          value={question.years}
          onInput={(years) => change({ years })}
          hint={wrong.years}
          wrong={wrong.years !== undefined}
          input={{ inputMode: "decimal" }}
        />
      </div>
    </>
  );
}
