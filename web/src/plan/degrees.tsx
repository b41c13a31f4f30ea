import { millis, money, number, percent } from "../format";
import type { Degree, Excluded, Interval, PlanRecord } from "./types";
import { between } from "./verdict";

interface Measure {
  name: string;
  value: (degree: Degree) => number | null;
  text: (value: number) => string;
  range?: (degree: Degree) => Interval;
}

const MEASURES: Measure[] = [
  { name: "TTFT", value: (each) => each.ttft_ms.mid, text: millis, range: (each) => each.ttft_ms },
  { name: "TPOT", value: (each) => each.tpot_ms.mid, text: millis, range: (each) => each.tpot_ms },
  ...(["p50", "p95", "p99"] as const).flatMap((share) => [
    { name: `TTFT ${share}`, value: (each: Degree) => each[`ttft_${share}_ms`], text: millis },
    { name: `TPOT ${share}`, value: (each: Degree) => each[`tpot_${share}_ms`], text: millis },
  ]),
  { name: "Output tok/s", value: (each) => each.tokens_per_s.mid, text: number, range: (each) => each.tokens_per_s },
  { name: "tok/s per GPU", value: (each) => each.tokens_per_s_per_gpu, text: number },
  { name: "USD per M tokens", value: (each) => each.usd_per_million_tokens, text: money },
  { name: "All-reduce share", value: (each) => each.all_reduce_share, text: percent },
  { name: "Scaling efficiency", value: (each) => each.scaling_efficiency, text: percent },
  { name: "Weights per GPU", value: (each) => each.weights_gib_per_gpu, text: (value) => `${number(value)} GiB` },
  { name: "KV tokens", value: (each) => each.kv_tokens, text: (value) => value.toLocaleString("en-US") },
  { name: "Longest context", value: (each) => each.longest_context, text: (value) => value.toLocaleString("en-US") },
];
const SHORT: Record<string, string> = {
  does_not_fit: "does not fit",
  illegal_shape: "cannot be split",
  not_loadable: "not loaded",
  context_too_long: "too long",
};

/** The winner's runtime and format at every degree: a column each, with the interval that holds nine times in ten. */
export function Degrees(props: { plan: PlanRecord }) {
  const { plan } = props;
  const best = plan.best!;
  const lacking = plan.excluded.filter(
    (each) =>
      each.engine === best.engine &&
      each.weight_format === best.weight_format &&
      !plan.side_by_side.some((degree) => degree.tp === each.tp),
  );
  const columns = [...plan.side_by_side, ...lacking].sort((a, b) => a.tp - b.tp);
  return (
    <section class="card" aria-labelledby="degrees">
      <h2 id="degrees">
        TP degrees side by side <span class="quiet small">whiskers: 90 % interval</span>
      </h2>
      <div class="table-scroll" role="region" aria-labelledby="degrees" tabIndex={0}>
        <table class="degrees" style={{ "--columns": columns.length }}>
          <thead>
            <tr>
              <td />
              {columns.map((each) => (
                <th scope="col" key={each.tp} class={each.tp === best.tp ? "chosen" : undefined}>
                  TP={each.tp}
                  {"replicas" in each && (
                    <span class="quiet">
                      {each.expert_parallel ? " + EP" : ""} × {each.replicas}
                    </span>
                  )}
                  {each.tp === best.tp && <span class="tag good">best</span>}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {MEASURES.map((measure) => (
              <tr key={measure.name}>
                <th scope="row">{measure.name}</th>
                {columns.map((each) => (
                  <td key={each.tp} class={each.tp === best.tp ? "chosen" : undefined}>
                    {"replicas" in each ? (
                      <Cell measure={measure} degree={each} most={most(measure, plan.side_by_side)} />
                    ) : (
                      <Lacking measure={measure} excluded={each} />
                    )}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function most(measure: Measure, degrees: Degree[]): number {
  return Math.max(...degrees.map((each) => measure.range?.(each).high ?? 0));
}

function Cell(props: { measure: Measure; degree: Degree; most: number }) {
  const { measure, degree } = props;
  const value = measure.value(degree);
  const range = measure.range?.(degree);
  return (
    <>
      {value === null ? "–" : measure.text(value)}
      {range && (
        <>
          <Whisker range={range} most={props.most} />
          <span class="range">{between(range, measure.text)}</span>
        </>
      )}
    </>
  );
}

/** The interval on a common scale from zero. */
function Whisker(props: { range: Interval; most: number }) {
  const at = (value: number) => `${(100 * value) / props.most}%`;
  const { low, mid, high } = props.range;
  return (
    <span class="whisker" aria-hidden="true">
      <i class="span" style={{ left: at(low), width: at(high - low) }} />
      <i class="mid" style={{ left: at(mid) }} />
    </span>
  );
}

function Lacking(props: { measure: Measure; excluded: Excluded }) {
  if (props.measure !== MEASURES[0]) return <span class="quiet">–</span>;
  return <span class="tag bad">{SHORT[props.excluded.code] ?? props.excluded.code}</span>;
}
