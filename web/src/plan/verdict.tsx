import { millis, money, number, percent } from "../format";
import type { Catalog, Interval, PlanRecord } from "./types";

/** Does it fit, how, and how fast: the answer in one line and six numbers. */
export function Verdict(props: { plan: PlanRecord; catalog: Catalog }) {
  const { plan, catalog } = props;
  const { best } = plan;
  if (best === null)
    return (
      <section class="card verdict" aria-labelledby="verdict">
        <h2 id="verdict">
          <span class="tag bad">does not fit</span> {plan.model.name} does not run on {plan.machine} like this.
        </h2>
        {plan.advice.map((line) => (
          <p key={line}>{line}</p>
        ))}
        <p class="quiet small">The reasons, with their numbers, are below.</p>
      </section>
    );
  const title = catalog.engines.find((each) => each.name === best.engine)?.title ?? best.engine;
  const goal = plan.slo_ms.ttft !== null || plan.slo_ms.tpot !== null;
  return (
    <section class="card verdict" aria-labelledby="verdict">
      <p class="asked">
        {plan.model.name} on {plan.machine}, {traffic(plan)}
      </p>
      <h2 id="verdict">
        {best.is_held ? <span class="tag good">fits</span> : <span class="tag bad">cannot hold this rate</span>}
        {goal && (plan.meets_slo ? <span class="tag good">meets the goals</span> : <span class="tag warn">too slow</span>)}{" "}
        {title}, {best.weight_format}, TP={best.tp}
        {best.expert_parallel ? " + EP" : ""}
        {best.replicas > 1 ? ` × ${best.replicas} replicas` : ""}
      </h2>
      <p class="quiet">{plan.explanation.replace(/^[^:]*: e/, "E")}</p>
      {!best.is_held && <p class="advice">{plan.verdict}</p>}
      {plan.advice.length > 0 && <p class="advice">{plan.advice.join(" ")}</p>}
      <dl class="figures">
        <Figure name="First token (TTFT)" value={millis(best.ttft_ms.mid)} range={best.ttft_ms} unit={millis} />
        <Figure name="Between tokens (TPOT)" value={millis(best.tpot_ms.mid)} range={best.tpot_ms} unit={millis} />
        <Figure name="Output tokens" value={`${number(best.tokens_per_s.mid)}/s`} range={best.tokens_per_s} unit={number} />
        <Figure name="Each GPU" value={`${number(best.tokens_per_s_per_gpu)} tok/s`} note={`${percent(best.all_reduce_share)} all-reduce`} />
        <Figure
          name="A million tokens"
          value={best.usd_per_million_tokens === null ? "–" : money(best.usd_per_million_tokens)}
          note={plan.cost?.basis ?? ""}
        />
        <Figure
          name="Longest context"
          value={best.longest_context.toLocaleString("en-US")}
          note={`KV for ${best.kv_tokens.toLocaleString("en-US")} tokens`}
        />
      </dl>
      {plan.day && <p class="quiet small">{plan.day}</p>}
    </section>
  );
}

const traffic = (plan: PlanRecord): string =>
  plan.workload.rate === null ? `${plan.workload.concurrency} at once` : `${plan.workload.rate} requests/s`;

function Figure(props: { name: string; value: string; range?: Interval; unit?: (value: number) => string; note?: string }) {
  const { range, unit } = props;
  return (
    <div>
      <dt>{props.name}</dt>
      <dd>{props.value}</dd>
      <dd class="note">{range && unit ? between(range, unit) : props.note}</dd>
    </div>
  );
}

/** The bounds that hold nine times in ten. */
export function between(range: Interval, unit: (value: number) => string): string {
  return `${unit(range.low).replace(/ (ms|s)$/, "")} – ${unit(range.high)}`;
}
