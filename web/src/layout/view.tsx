import { useEffect, useState } from "preact/hooks";
import { ApiError, get } from "../api";
import { parameters } from "../format";
import { keepQuery } from "../router";
import type { About } from "../session";
import "../styles/layout.css";
import { Select, Slider } from "../ui/field";
import { readState, useSplit, writeState, type Answer, type Choices, type Split, type State } from "./data";
import { Holdings } from "./holdings";
import { Picture } from "./picture";
import { Player } from "./player";
import { factsOf, kindOf, mixerName, stagesOf, type Stage } from "./stages";
import { bytes, shape } from "./units";

const MOST_DOUBLINGS = 13;

export function LayoutView(props: { server: About; query: URLSearchParams }) {
  const [choices, setChoices] = useState<Choices | null>(null);
  const [failed, setFailed] = useState("");
  const [state, setState] = useState<State | null>(null);
  useEffect(() => {
    get<Choices>("cockpit/layout/choices").then(setChoices, (error) =>
      setFailed(error instanceof ApiError ? error.message : String(error)),
    );
  }, []);
  useEffect(() => {
    if (choices) setState(readState(props.query, choices));
  }, [choices, props.query]);
  const change = (part: Partial<State>) => {
    const next = { ...state!, ...part };
    keepQuery("layout", writeState(next));
    setState(next);
  };
  const { answer, problem } = useSplit(state);
  if (!choices || !state) return failed ? <Told text={failed} /> : null;
  const refusal = problem || answer?.refusal;
  return (
    <div class="stack layout">
      <Controls state={state} choices={choices} answer={answer} change={change} />
      {refusal && <Told text={refusal} />}
      {!refusal && answer && answer.refusal === null && <TooLarge split={answer} />}
      {!refusal && answer && answer.refusal === null && <Shown split={answer} state={state} change={change} />}
    </div>
  );
}

/** Weights that a card cannot hold are dealt all the same: the picture is right, but it cannot be served. */
function TooLarge(props: { split: Split }) {
  const { split } = props;
  const short = split.ranks.filter((each) => each.room_bytes <= 0);
  if (!short.length) return null;
  const worst = short.reduce((most, each) => (each.room_bytes < most.room_bytes ? each : most));
  return (
    <p class="told" role="alert">
      {short.length === split.tp ? "No rank fits" : `${short.length} of ${split.tp} ranks do not fit`}: rank {worst.rank} holds{" "}
      {bytes(worst.weight_bytes)} of weights on a {split.gpu} of {bytes(split.card_bytes)} and lacks {bytes(-worst.room_bytes)}. Use
      more ranks, a smaller format or larger cards.
    </p>
  );
}

function Told(props: { text: string }) {
  return (
    <p class="told" role="alert">
      {props.text}
    </p>
  );
}

function Controls(props: {
  state: State;
  choices: Choices;
  answer: Answer | null;
  change: (part: Partial<State>) => void;
}) {
  const { state, choices, answer, change } = props;
  const known = (names: string[], name: string) => (names.includes(name) ? names : [name, ...names]);
  const plain = (names: string[]) => names.map((name) => [name, name] as const);
  const doublings = Math.round(Math.log2(state.tokens));
  return (
    <form class="card layout-controls" aria-label="What to look at" onSubmit={(event) => event.preventDefault()}>
      <Select
        label="Model"
        value={state.model}
        options={plain(known(choices.models, state.model))}
        onChange={(model) => change({ model, format: "", layer: 0, rank: 0 })}
      />
      <Select
        label="Format"
        value={state.format || answer?.format || ""}
        options={plain(known(choices.formats, state.format || answer?.format || ""))}
        onChange={(format) => change({ format })}
      />
      <Select
        label="GPU"
        value={state.gpu}
        options={known(choices.gpus, state.gpu).map((name) => [name, `${state.tp} × ${name}`] as const)}
        onChange={(gpu) => change({ gpu })}
      />
      <Select
        label="GPUs in all"
        value={String(state.gpus ?? state.tp)}
        options={[...new Set([1, 2, 3, 4, 8].map((times) => times * state.tp).concat(state.gpus ?? state.tp))]
          .sort((a, b) => a - b)
          .map((count) => [String(count), `${count}: ${Math.max(1, Math.floor(count / state.tp))} × TP=${state.tp}`] as const)}
        onChange={(gpus) => change({ gpus: Number(gpus) })}
      />
      <Slider
        label="Tokens in the step"
        value={doublings}
        min={0}
        max={MOST_DOUBLINGS}
        step={1}
        text={state.tokens.toLocaleString("en-US")}
        onInput={(power) => change({ tokens: 2 ** power })}
      />
      <Degrees state={state} answer={answer} change={change} />
    </form>
  );
}

/** TP degrees; those this model cannot be dealt to are marked and say why when chosen. */
function Degrees(props: { state: State; answer: Answer | null; change: (part: Partial<State>) => void }) {
  const { state, change } = props;
  const degrees = props.answer?.degrees ?? [];
  const listed = degrees.some((each) => each.tp === state.tp) ? degrees : [...degrees, { tp: state.tp, refusal: null }];
  return (
    <fieldset class="tp-degrees">
      <legend>Tensor parallel</legend>
      {listed.map(({ tp, refusal }) => (
        <label key={tp} class={refusal ? "degree refused" : "degree"} title={refusal ?? undefined}>
          <input
            type="radio"
            name="tp"
            value={tp}
            checked={tp === state.tp}
            onChange={() => change({ tp, rank: Math.min(state.rank, tp - 1) })}
          />
          {tp}
          {refusal && <span class="hidden-label"> (not for this model)</span>}
        </label>
      ))}
    </fieldset>
  );
}

function Shown(props: { split: Split; state: State; change: (part: Partial<State>) => void }) {
  const { split, change } = props;
  const stages = stagesOf(split);
  const rank = Math.min(props.state.rank, split.tp - 1);
  const step = props.state.step === null ? null : Math.min(props.state.step, stages.length - 1);
  const goTo = (next: number | null) => change({ step: next });
  const choose = (chosen: number) => change({ rank: chosen });
  return (
    <>
      <div class="layout-body">
        <section class="card" aria-labelledby="one-layer">
          <h2 id="one-layer">
            Layer {split.layer} of {split.name}
          </h2>
          <Layers split={split} layer={Math.min(props.state.layer, split.model.layers - 1)} change={change} />
          <Picture split={split} stages={stages} step={step} rank={rank} goTo={goTo} choose={choose} />
          <Legend split={split} />
        </section>
        <section class="card side" aria-labelledby="this-step">
          <Player steps={stages.length} step={step} goTo={goTo} />
          <Detail split={split} stage={step === null ? null : stages[step]!} number={step} of={stages.length} rank={rank} />
        </section>
      </div>
      <Holdings split={split} rank={rank} choose={choose} />
    </>
  );
}

/** All layers in a strip, coloured by their kind, and the one in the picture. */
function Layers(props: { split: Split; layer: number; change: (part: Partial<State>) => void }) {
  const { layer, change } = props;
  const { layers, kinds, kind_of_layer: kindOfLayer } = props.split.model;
  const kind = kinds[kindOfLayer[layer]!]!;
  return (
    <div class="layers">
      <Slider
        label="Layer"
        value={layer}
        min={0}
        max={layers - 1}
        step={1}
        text={`${layer} (of ${layers}): ${mixerName(kind).toLowerCase()}, ${kind.experts ? "experts" : "dense FFN"}`}
        onInput={(chosen) => change({ layer: chosen })}
      />
      <div class="strip" aria-hidden="true">
        {kindOfLayer.map((each, index) => (
          <span key={index} data-kind={each % 4} data-chosen={index === layer || undefined} />
        ))}
      </div>
    </div>
  );
}

function Legend(props: { split: Split }) {
  const kind = kindOf(props.split);
  return (
    <p class="picture-legend small quiet">
      <span>
        <span class="head-cell kv" /> {kind.mixer === "latent" ? "latent" : kind.mixer === "state" ? "key head" : "KV head"}
      </span>
      <span>
        <span class="head-cell q" /> {kind.mixer === "state" ? "value head" : "query head"}
      </span>
      {props.split.dealt.kv_heads?.replicated && (
        <span>
          <span class="head-cell kv copied" /> held by several ranks
        </span>
      )}
      <span>
        <span class="head-cell ffn" /> FFN columns
      </span>
      <span>
        <span class="head-cell partial" /> partial sum
      </span>
    </p>
  );
}

function Detail(props: { split: Split; stage: Stage | null; number: number | null; of: number; rank: number }) {
  const { split, stage, rank } = props;
  const { model } = split;
  if (!stage)
    return (
      <div class="step-detail" aria-live="polite">
        <h2 id="this-step">One decoder layer</h2>
        <p>
          Products are cut by columns, then by rows, in pairs: inside a layer, ranks meet at two all-reduces only. Play, or
          step with the arrow keys.
        </p>
        <Facts
          facts={[
            ["Model", `${parameters(model.parameters)} parameters, ${split.format}`],
            ["Layer", `${model.layers} of width ${model.hidden.toLocaleString("en-US")}`],
            ["Heads", `${model.heads} query, ${model.kv_heads} KV, of ${model.head_dim}`],
            ["Most weights", bytes(Math.max(...split.ranks.map((each) => each.weight_bytes)))],
            ["Moved", `${bytes(split.all_reduce.bytes)} × ${split.all_reduce.count} a step`],
          ]}
        />
      </div>
    );
  const tensors = (stage.part ? split.parts[stage.part]?.tensors ?? [] : []).filter((tensor) => tensor.shape.length > 1);
  return (
    <div class="step-detail" aria-live="polite">
      <p class="small quiet">
        Step {props.number! + 1} of {props.of} · rank {rank}
      </p>
      <h2 id="this-step">{stage.title}</h2>
      <p>{stage.says}</p>
      <Facts facts={factsOf(stage, split, rank)} />
      {tensors.length > 0 && (
        <ul class="tensors">
          {tensors.map((tensor) => (
            <li key={tensor.name}>
              <code>{tensor.name.replace(/\.weight$/, "")}</code>
              <span class="small quiet">
                {tensor.copies > 1 && `${tensor.copies} × `}
                {shape(tensor.shape)} → <strong>{shape(tensor.shapes[rank]!)}</strong> · {bytes(tensor.bytes[rank]!)}
                {tensor.axis === null && ", whole on every rank"}
              </span>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

function Facts(props: { facts: [string, string][] }) {
  return (
    <dl class="facts">
      {props.facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
