import { number } from "../format";

export function bytes(count: number): string {
  const scales = ["B", "KiB", "MiB", "GiB", "TiB"];
  const scale = Math.min(scales.length - 1, Math.max(0, Math.floor(Math.log2(Math.max(count, 1)) / 10)));
  return `${number(count / 2 ** (10 * scale))} ${scales[scale]}`;
}

export function seconds(value: number): string {
  if (value >= 0.01) return `${number(value * 1e3)} ms`;
  return value >= 1e-3 ? `${number(value * 1e3)} ms` : `${number(value * 1e6)} µs`;
}

export const shape = (sizes: number[]): string => sizes.map((size) => size.toLocaleString("en-US")).join(" × ");

/** `3`, or `3–7`: the last one is included. Nothing for an empty share. */
export function span([start, stop]: readonly [number, number]): string {
  if (start >= stop) return "none";
  const [first, last] = [start, stop - 1].map((value) => value.toLocaleString("en-US"));
  return stop - start === 1 ? first! : `${first}–${last}`;
}

export const plural = (count: number, what: string): string =>
  `${count.toLocaleString("en-US")} ${what}${count === 1 ? "" : "s"}`;
