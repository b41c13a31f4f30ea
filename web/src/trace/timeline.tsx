import { useMemo } from "preact/hooks";
import { millis, number } from "../format";
import { ranksOf, stepSlices, type Slice, type Trace } from "./data";

const WIDTH = 1000;
const LANE = 18;
const LANES = 3;
const GAP = 14;

/** Which of a rank's lanes a slice lies in: parts, collectives, and in those waiting and exchanging. */
function laneOf(slice: Slice): number | null {
  if (/^(step|layer) \d+$/.test(slice.name)) return null;
  if (slice.name === "all-reduce" || slice.name === "gather") return 1;
  return slice.name === "exchange" || slice.name.startsWith("waits for") ? 2 : 0;
}

function toneOf(name: string): string {
  if (name.includes("attention") || name === "delta net") return "mixer";
  if (name === "FFN" || name === "experts") return "ffn";
  if (name.startsWith("waits for")) return "wait";
  if (name === "exchange") return "exchange";
  return name === "all-reduce" || name === "gather" ? "call" : "other";
}

/** One step, a band for every rank: the parts, and below them the collectives in which it waits and exchanges. */
export function Timeline(props: { trace: Trace; step: string }) {
  const { trace, step } = props;
  const ranks = useMemo(() => ranksOf(trace), [trace]);
  const whole = stepSlices(trace).filter((slice) => slice.name === step);
  const from = Math.min(...whole.map((slice) => slice.ts));
  const until = Math.max(...whole.map((slice) => slice.ts + slice.dur));
  const scale = WIDTH / Math.max(until - from, 1);
  const shown = trace.slices.filter((slice) => slice.ts >= from && slice.ts + slice.dur <= until + 0.01);
  const height = ranks.length * (LANES * LANE + GAP) + LANE;
  return (
    <svg class="trace-line" viewBox={`0 0 ${WIDTH} ${height}`} role="img" aria-label={`${step}: ${describe(shown, ranks)}`}>
      {ranks.map((rank, band) => (
        <g key={rank} transform={`translate(0 ${band * (LANES * LANE + GAP)})`}>
          <text x={0} y={LANE - 5}>
            rank {rank}
          </text>
          {shown.map((slice, index) => {
            const lane = laneOf(slice);
            if (slice.pid !== rank || lane === null) return null;
            return (
              <rect
                key={index}
                class={toneOf(slice.name)}
                x={(slice.ts - from) * scale}
                y={LANE + lane * (LANE - 4)}
                width={Math.max(slice.dur * scale - 0.2, 0.3)}
                height={LANE - 6}
              >
                <title>{titleOf(slice)}</title>
              </rect>
            );
          })}
        </g>
      ))}
      <text x={WIDTH} y={height - 4} text-anchor="end">
        {millis((until - from) / 1000)}
      </text>
    </svg>
  );
}

function titleOf(slice: Slice): string {
  const bytes = slice.args?.bytes;
  return `${slice.name}: ${number(slice.dur)} µs${bytes ? `, ${number(bytes / 1024)} KiB` : ""}`;
}

/** For those who do not see it: how long each rank waited. */
function describe(slices: Slice[], ranks: number[]): string {
  const waited = (rank: number) =>
    slices.filter((slice) => slice.pid === rank && slice.name.startsWith("waits for")).reduce((sum, each) => sum + each.dur, 0);
  return ranks.map((rank) => `rank ${rank} waited ${millis(waited(rank) / 1000)}`).join(", ");
}
