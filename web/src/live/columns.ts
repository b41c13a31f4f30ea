import type { AlignedData } from "uplot";
import type { Sample } from "./stream";

/** Longer without a sample is a hole: nobody knows what happened there. */
const HOLE_S = 3;

type Value = number | null | undefined;

/** What a series shows of a sample. */
export type Reading = (sample: Sample) => Value;

/** Samples with an empty one in each hole, so that no line crosses it. */
export function withHoles(samples: Sample[]): (Sample | number)[] {
  const rows: (Sample | number)[] = [];
  let before: Sample | null = null;
  for (const sample of samples) {
    if (before !== null && sample.t - before.t > HOLE_S) rows.push((sample.t + before.t) / 2);
    rows.push(sample);
    before = sample;
  }
  return rows;
}

export function columns(rows: (Sample | number)[], readings: Reading[]): AlignedData {
  const times = rows.map((row) => (typeof row === "number" ? row : row.t));
  const values = readings.map((read) => rows.map((row) => (typeof row === "number" ? null : (read(row) ?? null))));
  return [times, ...values] as AlignedData;
}

/** From when to when there was no engine. */
export function outages(samples: Sample[]): [number, number][] {
  const found: [number, number][] = [];
  for (const sample of samples) {
    if (sample.up) continue;
    const last = found[found.length - 1];
    if (last !== undefined && sample.t - last[1] <= HOLE_S) last[1] = sample.t;
    else found.push([sample.t - 1, sample.t]);
  }
  return found;
}

export interface Peak {
  value: number;
  time: number;
}

/** The spike that an axis should not reach up to, and where it should end instead: above nearly all values, so that one
 * long prompt does not flatten an hour. Null where values are alike, or too few to tell. */
export function spike(rows: (Sample | number)[], readings: Reading[]): { usual: number; peak: Peak } | null {
  const highest: number[] = [];
  let peak: Peak = { value: 0, time: 0 };
  for (const row of rows) {
    if (typeof row === "number") continue;
    const value = Math.max(0, ...readings.map((read) => read(row) ?? 0));
    if (value > 0) highest.push(value);
    if (value > peak.value) peak = { value, time: row.t };
  }
  highest.sort((a, b) => a - b);
  const usual = 1.15 * (highest[Math.floor(0.97 * highest.length)] ?? 0);
  return peak.value > 1.5 * usual && usual > 0 ? { usual, peak } : null;
}

/** The end of an axis: a round number a little above the largest value, so that it seldom changes. */
export function roundAbove(value: number, least: number): number {
  const top = Math.max(value * 1.05, least);
  const power = 10 ** Math.floor(Math.log10(top));
  return ([1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= top) ?? 10) * power;
}
