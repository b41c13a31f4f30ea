import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, call, events } from "../api";
import type { Finding } from "../trace/data";

/** A second of the engine's life, as `phalanx.web.sampler.Sample` tells it. */
export interface Sample {
  t: number;
  up: boolean;
  in: number;
  cached: number;
  out: number;
  expected_out: number | null;
  /** Milliseconds: 50th, 90th, 99th percentile of the last ten seconds. */
  ttft: [number, number, number] | null;
  itl: [number, number, number] | null;
  itl_mean: number | null;
  /** Milliseconds: what to expect, and its bounds. */
  expected_itl: [number, number, number] | null;
  running: number;
  waiting: number;
  held: number;
  kept: number;
  hits: number | null;
  accepted: number | null;
  preemptions: number;
  steps: number;
  /** Of each rank: milliseconds a step by part, and its busy share. */
  ranks: ([number[], number] | null)[];
  /** Of each GPU: GiB in use, watts, degrees Celsius. */
  gpus: [number | null, number | null, number | null][];
}

/** A GPU of the server's machine; memory in GiB. */
export interface Gpu {
  gpu: number;
  name: string;
  memory: number | null;
  watts_limit: number | null;
}

export interface RankHealth {
  rank: number;
  step: number;
  beat_age_s: number;
  busy_s: number;
  stuck: boolean;
}

export interface EngineState {
  status: "starting" | "ready" | "stuck" | "restarting" | "draining" | "dead";
  reason: { code: string; found: string; fix: string } | null;
  loaded: number | null;
  restarts_left: number;
  requests: number;
  device: string | null;
  max_num_seqs: number | null;
  kv_tokens: number | null;
  ranks: RankHealth[];
  expected: { kind: "plan" | "baseline"; source: string } | null;
  viewers: number;
  /** What there is to say of its last minute. */
  notes: Finding[];
  gpus: Gpu[];
}

/** How the page stands with the server: `refused` is final, `lost` is tried again. */
export type Link = "connecting" | "open" | "lost" | "refused";

export interface Live {
  link: Link;
  state: EngineState | null;
  samples: Sample[];
}

const KEPT_S = 3600;
const SILENT_MS = 6000;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 4000;

/** Samples by time, of the last hour. After a reconnect the server's own history takes the place of ours. */
export function merged(known: Sample[], fresh: Sample[]): Sample[] {
  if (!fresh.length) return known;
  const first = fresh[0]!.t;
  const last = fresh[fresh.length - 1]!.t;
  const older = known.filter((sample) => sample.t < first && sample.t > last - KEPT_S);
  return [...older, ...fresh];
}

/** Follows the server's stream, which begins so many seconds ago; when it is lost, comes back to it by itself. */
export function useLive(seconds: number): Live {
  const [live, setLive] = useState<Live>({ link: "connecting", state: null, samples: [] });
  const longest = useRef(0);
  longest.current = Math.max(longest.current, seconds);
  useEffect(() => {
    const stop = new AbortController();
    const take = (data: string) => {
      const { state, samples } = JSON.parse(data) as { state: EngineState; samples: Sample[] };
      setLive((before) => ({ link: "open", state, samples: merged(before.samples, samples) }));
    };
    void follow(longest.current, stop.signal, take, (link) => setLive((before) => ({ ...before, link })));
    return () => stop.abort();
  }, [longest.current]);
  return live;
}

async function follow(
  seconds: number,
  stop: AbortSignal,
  take: (data: string) => void,
  tell: (link: Link) => void,
): Promise<void> {
  let pause = FIRST_PAUSE_MS;
  while (!stop.aborted) {
    const silent = new AbortController();
    let watchdog = setTimeout(() => silent.abort(), SILENT_MS);
    try {
      const answer = await call(`cockpit/live?seconds=${seconds}`, { signal: AbortSignal.any([stop, silent.signal]) });
      for await (const data of events(answer)) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => silent.abort(), SILENT_MS);
        pause = FIRST_PAUSE_MS;
        take(data);
      }
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return tell("refused");
    } finally {
      clearTimeout(watchdog);
    }
    if (stop.aborted) return;
    tell("lost");
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}
