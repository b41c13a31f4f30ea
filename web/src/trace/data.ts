import { postStream } from "../api";

/** A slice of time in Chrome's words: microseconds. */
export interface Slice {
  ph: "X";
  pid: number;
  tid: number;
  name: string;
  ts: number;
  dur: number;
  args?: Record<string, number>;
}

export interface PartTime {
  name: string;
  mean: number;
  most: number;
  rank: number | null;
}

/** Of decode steps or of steps with prompts, in milliseconds a step. */
export interface Summary {
  kind: string;
  steps: number;
  ranks: number;
  period: number;
  calls: number;
  call_bytes: number;
  parts: PartTime[];
}

export interface Finding {
  level: "error" | "warning" | "note" | "ok";
  code: string;
  title: string;
  found: string;
  why: string;
  fix: string;
}

/** A trace, and the file it came as. */
export interface Trace {
  slices: Slice[];
  summaries: Summary[];
  findings: Finding[];
  file: string;
}

export async function takeTrace(steps: number, signal: AbortSignal): Promise<Trace> {
  const file = await (await postStream("trace", { steps, seconds: 20 }, signal)).text();
  const { traceEvents, summaries, findings } = JSON.parse(file);
  return { slices: traceEvents.filter((event: { ph: string }) => event.ph === "X"), summaries, findings, file };
}

export const ranksOf = (trace: Trace): number[] =>
  [...new Set(stepSlices(trace).map((slice) => slice.pid))].sort((one, other) => one - other);

/** The slices that stand for whole steps, of all ranks. */
export const stepSlices = (trace: Trace): Slice[] => trace.slices.filter((slice) => /^step \d+$/.test(slice.name));
