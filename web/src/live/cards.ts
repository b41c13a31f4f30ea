import { number, percent } from "../format";
import type { Shown } from "./card";
import type { Sample } from "./stream";

/** Milliseconds in the unit that a person would choose. */
export function millis(value: number): string {
  if (value >= 1000) return `${number(value / 1000)} s`;
  return value >= 1 || value === 0 ? `${number(value)} ms` : `${number(value * 1000)} µs`;
}

export const axisPercent = (share: number): string => `${number(share * 100, 2)} %`;

export const axisCount = (value: number): string => (value >= 10_000 ? `${number(value / 1000)}k` : number(value));

const rate = (value: number) => `${number(value)} tok/s`;
const requests = (value: number) => (value >= 10 ? `${Math.round(value)}` : number(value, 2));

/** The lines of each card. `expected` is what measurements are held against: `plan` or `baseline`. */
export const outputLines = (expected: string, drafts: boolean): Shown[] => [
  { label: "output", color: "series-1", read: (s) => s.out, text: rate, big: true },
  { label: expected, color: "ink-2", read: (s) => s.expected_out, text: number, style: "dashed" },
  { label: `of ${expected}`, color: "ink-2", read: ofExpected, text: percent, style: "figure" },
  ...(drafts ? [acceptedLine] : []),
];

const acceptedLine: Shown = {
  ...{ label: "drafts true", color: "series-4", read: (s: Sample) => s.accepted, text: percent },
  style: "figure",
};

const ofExpected = (s: Sample) => (s.expected_out ? s.out / s.expected_out : null);

export const promptLines: Shown[] = [
  { label: "taken in", color: "series-6", read: (s) => s.in, text: rate, big: true },
  { label: "of it cached", color: "series-3", read: (s) => s.cached, text: number },
  { label: "hits, last 10 s", color: "series-3", read: (s) => s.hits, text: percent, style: "figure" },
];

const percentile = (which: "ttft" | "itl", index: 0 | 1 | 2) => (s: Sample) => s[which]?.[index];

const percentiles = (which: "ttft" | "itl"): Shown[] => [
  { label: "p50", color: "series-1", read: percentile(which, 0), text: millis, big: true },
  { label: "p90", color: "series-4", read: percentile(which, 1), text: millis },
  { label: "p99", color: "series-2", read: percentile(which, 2), text: millis },
];

export const firstTokenLines: Shown[] = percentiles("ttft");

export const gapLines = (expected: string): Shown[] => [
  { label: "low", color: "ink-2", read: (s) => s.expected_itl?.[1], text: millis, style: "bound" },
  { label: "high", color: "ink-2", read: (s) => s.expected_itl?.[2], text: millis, style: "bound" },
  ...percentiles("itl"),
  { label: expected, color: "ink-2", read: (s) => s.expected_itl?.[0], text: millis, style: "dashed" },
];

export const requestLines: Shown[] = [
  { label: "running", color: "series-1", read: (s) => s.running, text: requests, big: true },
  { label: "waiting", color: "series-2", read: (s) => s.waiting, text: requests },
];

/** Stacked: the upper one is drawn first, up to the sum of both. */
export const memoryLines: Shown[] = [
  { label: "kept for reuse", color: "series-free", read: (s) => s.held + s.kept, value: (s) => s.kept, text: percent, style: "area" },
  { label: "held by requests", color: "series-1", read: (s) => s.held, text: percent, style: "area", big: true },
];

/** Parts of a step from the top of the stack to its bottom, with their index in what the server sends. */
const PARTS = [
  { label: "schedule", color: "series-5", index: 0 },
  { label: "launch", color: "series-4", index: 1 },
  { label: "sample", color: "series-3", index: 4 },
  { label: "all-reduce", color: "series-2", index: 3 },
  { label: "compute", color: "series-1", index: 2 },
] as const;

export const stepTotal = (sample: Sample, rank: number): number | null => {
  const found = sample.ranks[rank];
  return found ? found[0].reduce((sum, part) => sum + part, 0) : null;
};

/** Of one rank; each line is drawn up to the sum of its part and those below it. */
export function partLines(rank: number): Shown[] {
  return PARTS.map(({ label, color, index }, position) => {
    const below: number[] = PARTS.slice(position).map((part) => part.index);
    return {
      label,
      color,
     
      text: millis,
      style: "area",
      value: (sample) => sample.ranks[rank]?.[0][index],
      read: (sample) => {
        const parts = sample.ranks[rank]?.[0];
        return parts && below.reduce((sum, each) => sum + parts[each]!, 0);
      },
    };
  });
}

/** The mean over ranks: the legend of all of them. */
export const meanPartLines: Shown[] = PARTS.map(({ label, color, index }) => {
  const mean = (sample: Sample) => {
    const known = sample.ranks.flatMap((rank) => (rank ? [rank[0][index]!] : []));
    return known.length ? known.reduce((sum, part) => sum + part, 0) / known.length : null;
  };
  return { label, color, text: millis, style: "area", read: mean };
});
