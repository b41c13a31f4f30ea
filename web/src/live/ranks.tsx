import { useMemo } from "preact/hooks";
import { percent } from "../format";
import { Amount, Figure } from "./card";
import { meanPartLines, millis, partLines, stepTotal } from "./cards";
import { TimeChart, type Timeline } from "./chart";
import { roundAbove } from "./columns";
import type { EngineState, RankHealth, Sample } from "./stream";

/** Every rank: whether it lives, what it is at, and where the time of its steps goes. */
export function Ranks(props: {
  count: number;
  state: EngineState | null;
  lost: boolean;
  samples: Sample[];
  moment: Sample | null;
  timeline: Timeline;
}) {
  const { state, samples, moment } = props;
  const ranks = Array.from({ length: props.count }, (_, rank) => rank);
  const most = roundAbove(usualMost(samples, ranks), 1);
  const slowest = othersWaitFor(samples, ranks);
  const onGpu = state?.device !== null && state?.device !== undefined && state.device !== "cpu";
  return (
    <section class="card live-ranks" aria-labelledby="live-ranks">
      <h2 id="live-ranks">
        Step time by rank <span class="quiet small">mean of a second, stacked by part</span>
      </h2>
      <dl class="figures">
        {meanPartLines.map((line) => (
          <Figure key={line.label} line={line} moment={moment} />
        ))}
      </dl>
      {onGpu && <p class="quiet small">On a GPU the all-reduces run inside the graph: their time is part of compute.</p>}
      <div class="rank-grid">
        {ranks.map((rank) => (
          <Rank
            key={rank}
            rank={rank}
            health={props.lost ? undefined : state?.ranks.find((each) => each.rank === rank)}
            moment={moment}
            timeline={props.timeline}
            most={most}
            isSlowest={rank === slowest}
            longest={longestOf(samples, rank)}
          />
        ))}
      </div>
    </section>
  );
}

/** The axis ends above nearly all steps: one long prompt must not flatten the rest. The longest is told in words. */
function usualMost(samples: Sample[], ranks: number[]): number {
  const totals = samples.flatMap((sample) => ranks.flatMap((rank) => stepTotal(sample, rank) ?? []));
  totals.sort((a, b) => a - b);
  return 1.15 * (totals[Math.floor(0.97 * totals.length)] ?? 0);
}

const longestOf = (samples: Sample[], rank: number): number =>
  Math.max(0, ...samples.map((sample) => stepTotal(sample, rank) ?? 0));

const RECENT = 30;
const ALL_REDUCE = 3;

/** The rank that waits least in all-reduces while another waits much: it is the slow one. */
function othersWaitFor(samples: Sample[], ranks: number[]): number | null {
  const recent = samples.slice(-RECENT).filter((sample) => ranks.every((rank) => sample.ranks[rank]));
  if (ranks.length < 2 || recent.length < RECENT / 3) return null;
  const mean = (read: (sample: Sample) => number) => recent.reduce((sum, each) => sum + read(each), 0) / recent.length;
  const waits = ranks.map((rank) => mean((sample) => sample.ranks[rank]![0][ALL_REDUCE]!));
  const least = Math.min(...waits);
  const step = mean((sample) => stepTotal(sample, 0)!);
  return Math.max(...waits) - least > 0.2 * step ? waits.indexOf(least) : null;
}

function Rank(props: {
  rank: number;
  health: RankHealth | undefined;
  moment: Sample | null;
  timeline: Timeline;
  most: number;
  longest: number;
  isSlowest: boolean;
}) {
  const { rank, health, moment } = props;
  const lines = useMemo(() => partLines(rank), [rank]);
  const total = moment === null ? null : stepTotal(moment, rank);
  const busy = moment?.ranks[rank]?.[1] ?? null;
  return (
    <section class="rank" aria-labelledby={`live-rank-${rank}`}>
      <div class="rank-head">
        <h3 id={`live-rank-${rank}`}>Rank {rank}</h3>
        <HealthTag health={health} />
        {props.isSlowest && <span class="tag warn">others wait for it</span>}
        <span class="rank-total">
          {total === null ? "–" : <Amount text={`${millis(total)} a step`} />}
        </span>
      </div>
      <p class="quiet small rank-facts">
        <span>{health ? `last sign ${age(health.beat_age_s)} ago` : "no sign"}</span>
        <span>step {health ? health.step.toLocaleString("en-US") : "–"}</span>
        <span>{busy === null ? "idle" : `busy ${percent(busy)}`}</span>
        <span>longest {props.longest ? millis(props.longest) : "–"}</span>
      </p>
      <TimeChart
        label={`Milliseconds a step of rank ${rank}, by part`}
        height={132}
        lines={lines}
        timeline={props.timeline}
        axisText={millis}
        least={props.most}
        most={props.most}
      />
    </section>
  );
}

function HealthTag(props: { health: RankHealth | undefined }) {
  const { health } = props;
  if (health === undefined) return <span class="tag bad">✕ gone</span>;
  if (health.stuck && health.busy_s > health.beat_age_s + 1)
    return <span class="tag bad">! stuck, {age(health.busy_s)} in one step</span>;
  if (health.stuck) return <span class="tag bad">! silent for {age(health.beat_age_s)}</span>;
  if (health.beat_age_s > 2) return <span class="tag warn">? quiet</span>;
  return <span class="tag good">✓ well</span>;
}

const age = (seconds: number): string => (seconds < 10 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds)} s`);
