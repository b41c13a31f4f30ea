import type uPlot from "uplot";
import { number, percent } from "../format";
import { axis, Chart, token } from "../ui/chart";
import type { ScalingPoint } from "./types";

/** Tokens a second of one replica by its ranks, at the same batch, and what takes most of a step. */
export function Scaling(props: { points: ScalingPoint[] }) {
  const { points } = props;
  const data = [
    points.map((point) => point.tp),
    points.map((point) => point.tokens_per_s),
    points.map((point) => point.ideal_tokens_per_s),
  ] as uPlot.AlignedData;
  return (
    <section class="card" aria-labelledby="scaling">
      <h2 id="scaling">
        Scaling <span class="quiet small">{points[0]!.batch} requests a replica at every degree</span>
      </h2>
      <Chart
        key={points.map((point) => point.tp).join()}
        label="Output tokens a second of a replica by TP degree, beside the fewest ranks' times the ranks. The table has the numbers."
        height={220}
        data={data}
        options={options}
      />
      <div class="table-scroll" role="region" aria-labelledby="scaling" tabIndex={0}>
        <table class="scaling">
          <thead>
            <tr>
              {["TP", "tok/s", "efficiency", "bound by", "all-reduces"].map((title) => (
                <th scope="col" key={title}>
                  {title}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {points.map((point) => (
              <tr key={point.tp}>
                <th scope="row">{point.tp}</th>
                <td>{number(point.tokens_per_s)}</td>
                <td>{percent(point.efficiency)}</td>
                <td>
                  {point.bound} ({percent(point.shares[point.bound]!)})
                </td>
                <td>{percent(point.shares["all-reduces"]!)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function options(): Omit<uPlot.Options, "width" | "height"> {
  const value = (_: uPlot, at: number | null) => (at === null || at === undefined ? "–" : number(at));
  return {
    scales: { x: { time: false }, y: { range: (_, __, high) => [0, high * 1.08] } },
    axes: [axis({ label: "TP" }), axis({ label: "tok/s of a replica", size: 64 })],
    series: [
      { label: "TP", value },
      { label: "predicted", stroke: token("series-1"), width: 2, points: { show: true, size: 7 }, value },
      { label: "as much a rank", stroke: token("ink-2"), width: 1, dash: [4, 4], points: { show: false }, value },
    ],
  };
}
