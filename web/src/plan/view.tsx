import { useEffect, useState } from "preact/hooks";
import { ApiError, get } from "../api";
import { number } from "../format";
import { keepQuery } from "../router";
import type { About } from "../session";
import "../styles/plan.css";
import { Degrees } from "./degrees";
import { Fits } from "./fits";
import { PlanForm } from "./form";
import { Launch } from "./launch";
import { Memory } from "./memory";
import { Draw, Money } from "./money";
import { Pareto } from "./pareto";
import { asked, check, FIELD_OF, fromQuery, toBody, toQuery, USUAL, type Question, type Wrong } from "./question";
import { Ranking, type Ranked } from "./ranking";
import { Refusals } from "./refusals";
import { Scaling } from "./scaling";
import type { Catalog, Fitting, PlanRecord, Point } from "./types";
import { useAnswer, useLater, type Answer } from "./use_answer";
import { Verdict } from "./verdict";

/** What was asked last: it is still there after a look at another view. */
let last: Question | null = null;

export function PlanView(props: { server: About; query: URLSearchParams }) {
  const [catalog, setCatalog] = useState<Catalog | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    get<Catalog>("cockpit/catalog").then(setCatalog, (error) => setProblem(error instanceof ApiError ? error.message : String(error)));
  }, []);
  if (catalog === null)
    return problem ? (
      <p class="told" role="alert">
        {problem}
      </p>
    ) : (
      <p class="quiet">Reading the catalog …</p>
    );
  return <Planner catalog={catalog} query={props.query} served={props.server.model} />;
}

/** In a cockpit beside an engine, the model that it serves, where the catalog knows it. */
function usual(catalog: Catalog, served: string | null): Question {
  const known = catalog.models.find((model) => served !== null && [model.name, model.id, model.id.split("/")[1]].includes(served));
  return known ? { ...USUAL, model: known.name } : USUAL;
}

function Planner(props: { catalog: Catalog; query: URLSearchParams; served: string | null }) {
  const { catalog } = props;
  const [question, setQuestion] = useState(() => fromQuery(props.query) ?? last ?? usual(catalog, props.served));
  useEffect(() => {
    const shared = fromQuery(props.query);
    if (shared) setQuestion(shared);
  }, [props.query]);
  useEffect(() => {
    last = question;
    keepQuery("plan", toQuery(question));
  }, [question]);

  const mistakes = check(question);
  const plan = useAnswer<PlanRecord>("cockpit/plan", Object.keys(mistakes).length ? null : toBody(question));
  const error = useLater(plan.error);
  const wrong = { ...toldBeside(error, Object.keys(mistakes).length > 0), ...mistakes };
  return (
    <div class="planner">
      <PlanForm
        question={question}
        catalog={catalog}
        wrong={wrong}
        change={(more) => setQuestion((old) => ({ ...old, ...more }))}
      />
      <Results
        question={question}
        catalog={catalog}
        plan={{ ...plan, error }}
        wrong={wrong}
        choose={(more) => setQuestion((old) => ({ ...old, ...more }))}
      />
    </div>
  );
}

/** An error of the planner at the field that it is about; it is out of date once something else is wrong. */
function toldBeside(error: ApiError | null, outdated: boolean): Wrong {
  const field = error?.param ? FIELD_OF[error.param] : undefined;
  return field && !outdated ? { [field]: error!.message } : {};
}

function Results(props: {
  question: Question;
  catalog: Catalog;
  plan: Answer<PlanRecord>;
  wrong: Wrong;
  choose: (more: Partial<Question>) => void;
}) {
  const { question, catalog, wrong } = props;
  const { value: plan, stale, error, took } = props.plan;
  const best = plan?.best ?? null;
  const settled = plan !== null && !stale;
  const pareto = useAnswer<{ points: Point[] }>(
    "cockpit/pareto",
    settled && best ? { ...toBody(question), engines: best.engine, formats: best.weight_format } : null,
  );
  const fits = useAnswer<{ machine: string; models: Fitting[] }>(
    "cockpit/fits",
    settled
      ? {
          machine: plan.machine,
          engines: question.engine || "vllm",
          kv_format: question.kv,
          context: plan.workload.context,
        }
      : null,
  );
  const ranking = useAnswer<Ranked>("cockpit/ranking", settled && best ? toBody(question) : null);
  const told = Object.values(wrong)[0] ?? (stale && error ? error.message : "");
  const engine = catalog.engines.find((each) => each.name === (question.engine || "vllm"))!;
  const age = told ? "stack old" : stale ? "stack stale" : "stack";
  return (
    <>
      <div class="answer">
        {plan && (
          <div class={age}>
            <Verdict plan={plan} catalog={catalog} />
          </div>
        )}
      </div>
      <div class="results">
        <div class="told-place" role="alert">
          {told && (
            <p class="told">
              {told} {plan && "What is shown is the last answer."}
            </p>
          )}
        </div>
        {plan && (
          <div class={age} aria-busy={stale && !told}>
            {best && plan.fit && (
              <Memory
                fit={plan.fit}
                replicas={best.replicas}
                sequences={Math.min(best.max_sequences, Math.ceil(plan.workload.concurrency / best.replicas))}
                tokens={plan.workload.input_tokens + plan.workload.output_tokens}
              />
            )}
            {best && <Degrees plan={plan} />}
            {best && (
              <div class={ranking.stale ? "stale" : undefined}>
                <Ranking ranked={ranking.value} catalog={catalog} choose={(engine) => props.choose({ engine })} />
              </div>
            )}
            {best === null && <Refusals excluded={plan.excluded} catalog={catalog} />}
            <Launch plan={plan} question={question} kinds={catalog.recipes} />
            {best && plan.scaling.length > 1 && <Scaling points={plan.scaling} />}
            {best && (
              <div class="halves">
                <div class="column">
                  <section class="card" aria-labelledby="pareto">
                    <h2 id="pareto">
                      Speed a GPU, speed a user <span class="quiet small">1 to 512 at once</span>
                    </h2>
                    <div class={pareto.stale ? "chart-place stale" : "chart-place"}>
                      {pareto.value && <Pareto points={pareto.value.points} best={best} />}
                    </div>
                  </section>
                  <section class="card" aria-labelledby="power">
                    <h2 id="power">Power</h2>
                    {plan.power_w && <Draw power={plan.power_w} />}
                  </section>
                </div>
                <section class="card" aria-labelledby="money">
                  <h2 id="money">Own, reserve or rent</h2>
                  {plan.cost && <Money cost={plan.cost} best={best} paid={plan.machine} />}
                </section>
              </div>
            )}
            {best && <Refusals excluded={plan.excluded} catalog={catalog} />}
            {fits.value && (
              <div class={fits.stale ? "stale" : undefined}>
                <Fits models={fits.value.models} machine={`${fits.value.machine} with ${engine.title}`} chosen={plan.model.name} choose={(model) => props.choose({ model })} />
              </div>
            )}
            <p class="quiet small">
              Planned in {number(took)} ms for TP={asked(question).join(", ")}; every number is the one of the command above
              with --json.
            </p>
          </div>
        )}
      </div>
    </>
  );
}
