import { useEffect, useState } from "preact/hooks";
import { ApiError, get } from "../api";
import { millis, money, number, parameters } from "../format";
import { keepQuery } from "../router";
import "../styles/plan.css";
import { Combobox } from "../ui/combobox";
import { TextField } from "../ui/field";
import { check, fromQuery, toBody, toQuery, USUAL, type Question, type Wrong } from "./question";
import type { Catalog, Compared } from "./types";
import { useAnswer, useLater } from "./use_answer";

const BEGINNING: Question = { ...USUAL, engine: "", machine: "4xH100-SXM,8xRTX4090,8xH200-SXM" };
const FIELDS: [keyof Question, string, string][] = [
  ["machine", "Machines, with commas", ""],
  ["input", "Input tokens", ""],
  ["output", "Output tokens", ""],
  ["concurrency", "Requests at once", ""],
  ["rate", "Requests/s", "closed loop"],
  ["ttft", "TTFT at most, ms", "any"],
  ["tpot", "TPOT at most, ms", "any"],
];
const ROWS: [string, (each: Compared) => string][] = [
  ["Memory", (each) => `${number(each.memory_gib)} GiB`],
  ["For weights and KV", (each) => `${number(each.effective_gib)} GiB`],
  ["Fits as", (each) => each.formats.join(", ") || "–"],
  ["Best", (each) => each.best ?? "does not fit"],
  ["Output tok/s", (each) => told(each.tokens_per_s, number)],
  ["TTFT", (each) => told(each.ttft_ms, millis)],
  ["TPOT", (each) => told(each.tpot_ms, millis)],
  ["USD per M tokens", (each) => told(each.usd_per_million_tokens, money)],
  ["USD an hour", (each) => told(each.usd_per_hour, money)],
  ["To buy", (each) => told(each.purchase_usd, money)],
  ["Power", (each) => told(each.power_w, (watts) => `${number(watts / 1000)} kW`)],
  ["Good and bad", (each) => each.good_and_bad],
  ["Readiness", (each) => each.readiness],
];

function told(value: number | null, text: (value: number) => string): string {
  return value === null ? "–" : text(value);
}

/** The same question of several machines, a column each. */
export function CompareView(props: { query: URLSearchParams }) {
  const [catalog, setCatalog] = useState<Catalog | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    get<Catalog>("cockpit/catalog").then(setCatalog, (error) => setProblem(error instanceof ApiError ? error.message : String(error)));
  }, []);
  if (catalog === null) return <p class="quiet">{problem || "Reading the catalog …"}</p>;
  return <Comparison catalog={catalog} query={props.query} />;
}

function Comparison(props: { catalog: Catalog; query: URLSearchParams }) {
  const [question, setQuestion] = useState<Question>(() => fromQuery(props.query) ?? BEGINNING);
  useEffect(() => keepQuery("compare", toQuery(question)), [question]);
  const wrong = check(question);
  const body = Object.keys(wrong).length ? null : { ...toBody(question), tps: "" };
  const answer = useAnswer<{ machines: Compared[] }>("cockpit/compare", body);
  const error = useLater(answer.error);
  const problem = Object.values(wrong)[0] ?? (answer.stale && error ? error.message : "");
  return (
    <div class="comparison stack">
      <Form
        question={question}
        catalog={props.catalog}
        wrong={wrong}
        change={(more) => setQuestion((old) => ({ ...old, ...more }))}
      />
      <div class="told-place" role="alert">
        {problem && <p class="told">{problem}</p>}
      </div>
      {answer.value && (
        <div class={answer.stale ? "stack stale" : "stack"} aria-busy={answer.stale}>
          <Table machines={answer.value.machines} model={question.model} />
        </div>
      )}
    </div>
  );
}

function Form(props: { question: Question; catalog: Catalog; wrong: Wrong; change: (more: Partial<Question>) => void }) {
  const { question, wrong, change } = props;
  return (
    <form class="card compare-form" aria-label="Question" onSubmit={(event) => event.preventDefault()}>
      <Combobox
        label="Model"
        value={question.model}
        choices={props.catalog.models.map((each) => ({ value: each.name, detail: parameters(each.parameters) }))}
        onInput={(model) => change({ model })}
        hint={wrong.model ?? ""}
        wrong={wrong.model !== undefined}
      />
      {FIELDS.map(([name, label, placeholder]) => (
        <TextField
          key={name}
          label={label}
          value={question[name]}
          onInput={(value) => change({ [name]: value })}
          wrong={wrong[name] !== undefined}
          input={{ placeholder }}
        />
      ))}
    </form>
  );
}

function Table(props: { machines: Compared[]; model: string }) {
  const { machines } = props;
  return (
    <section class="card" aria-labelledby="compared">
      <h2 id="compared">
        {props.model} <span class="quiet small">on {machines.length} machines</span>
      </h2>
      <div class="table-scroll" role="region" aria-labelledby="compared" tabIndex={0}>
        <table class="compared">
          <thead>
            <tr>
              <td />
              {machines.map((each) => (
                <th scope="col" key={each.machine}>
                  {each.machine}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {ROWS.map(([name, text]) => (
              <tr key={name}>
                <th scope="row">{name}</th>
                {machines.map((each) => (
                  <td key={each.machine}>{text(each)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {machines.map((each) => (
        <p class="quiet small" key={each.machine}>
          {sum(each)}
        </p>
      ))}
    </section>
  );
}

/** The way from all memory to what models can use. */
function sum(each: Compared): string {
  const kept = Object.entries(each.kept_gib).map(([what, gib]) => `− ${number(gib)} ${what}`);
  return `${each.machine}: ${number(each.memory_gib)} GiB ${kept.join(" ")} = ${number(each.effective_gib)} GiB for weights and KV.`;
}
