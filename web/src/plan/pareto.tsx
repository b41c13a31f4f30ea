import type uPlot from "uplot";
import { number } from "../format";
import { axis, Chart, token } from "../ui/chart";
import type { Candidate, Point } from "./types";

/** Speed a GPU against speed a user: a line a TP degree, a point a concurrency, and where this plan stands. */
export function Pareto(props: { points: Point[]; best: Candidate }) {
  const { best } = props;
  const points = [...new Set(props.points.map((point) => point.tp))].flatMap((tp) =>
    outer(props.points.filter((point) => point.tp === tp)),
  );
  const degrees = [...new Set(points.map((point) => point.tp))];
  const mine = { x: 1000 / best.tpot_ms.mid, y: best.tokens_per_s_per_gpu };
  const xs = [...new Set([...points.map((point) => point.tokens_per_s_per_user), mine.x])].sort((a, b) => a - b);
  const line = (tp: number) => {
    const at = new Map(points.filter((point) => point.tp === tp).map((point) => [point.tokens_per_s_per_user, point]));
    return xs.map((x) => at.get(x)?.tokens_per_s_per_gpu ?? null);
  };
  const data = [xs, ...degrees.map(line), xs.map((x) => (x === mine.x ? mine.y : null))] as uPlot.AlignedData;
  const front = points.filter((point) => point.on_front);
  return (
    <>
      <Chart
        key={degrees.join()}
        label={`Output tokens a second and GPU against those a user sees, for ${degrees.map((tp) => `TP=${tp}`).join(", ")}. The table has the front.`}
        height={280}
        data={data}
        options={() => chartOptions(degrees)}
      />
      <details>
        <summary>The front in numbers</summary>
        <div class="table-scroll" role="region" aria-label="Pareto front" tabIndex={0}>
          <table>
            <thead>
              <tr>
                <th scope="col">TP</th>
                <th scope="col">at once</th>
                <th scope="col">tok/s per user</th>
                <th scope="col">tok/s per GPU</th>
                <th scope="col">TTFT, ms</th>
              </tr>
            </thead>
            <tbody>
              {front.map((point) => (
                <tr key={`${point.tp} ${point.concurrency}`}>
                  <td>
                    TP={point.tp} × {point.replicas}
                  </td>
                  <td>{point.concurrency}</td>
                  <td>{number(point.tokens_per_s_per_user)}</td>
                  <td>{number(point.tokens_per_s_per_gpu)}</td>
                  <td>{number(point.ttft_ms)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </>
  );
}

/** Without the points that another of the same degree beats both ways: past the room of its KV cache more only wait. */
function outer(points: Point[]): Point[] {
  let most = 0;
  return [...points]
    .sort((a, b) => b.tokens_per_s_per_user - a.tokens_per_s_per_user)
    .filter((point) => point.tokens_per_s_per_gpu > most && (most = point.tokens_per_s_per_gpu));
}

function chartOptions(degrees: number[]): Omit<uPlot.Options, "width" | "height"> {
  const value = (_: uPlot, at: number | null) => (at === null || at === undefined ? "–" : number(at));
  return {
    scales: { x: { time: false }, y: { range: (_, __, high) => [0, high * 1.08] } },
    axes: [axis({ label: "tok/s per user" }), axis({ label: "tok/s per GPU", size: 64 })],
    series: [
      { label: "tok/s per user", value },
      ...degrees.map((tp, index) => ({
        label: `TP=${tp}`,
        stroke: token(`series-${(index % 6) + 1}`),
        width: 2,
        spanGaps: true,
        points: { show: true, size: 6 },
        value,
      })),
      {
        label: "this plan",
        stroke: token("ink"),
        width: 0,
        points: { show: true, size: 13, width: 2, stroke: token("ink"), fill: "transparent" },
        value,
      },
    ],
  };
}
