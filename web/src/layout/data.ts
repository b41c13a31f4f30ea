import { useEffect, useState } from "preact/hooks";
import { ApiError, get } from "../api";

export type Share = readonly [start: number, stop: number];

/** One kind of thing that is dealt, in units that are never cut. */
export interface Dealt {
  total: number;
  unit: number;
  blocks: boolean;
  shares: Share[];
  uneven: boolean;
  replicated: boolean;
}

export interface Tensor {
  name: string;
  shape: number[];
  axis: number | null;
  copies: number;
  shapes: number[][];
  bytes: number[];
}

export interface Part {
  tensors: Tensor[];
  /** The least the slowest rank needs. */
  seconds: number;
}

export interface LayerKind {
  mixer: "full" | "sliding" | "chunked" | "latent" | "state";
  reach: number | null;
  experts: boolean;
}

export type DealtName = "query_heads" | "kv_heads" | "state_heads" | "ffn" | "expert_ffn" | "shared_ffn" | "vocab";
export type PartName = "mixer_in" | "mixer_out" | "router" | "ffn_in" | "ffn_out";

interface Numbers {
  layers: number;
  hidden: number;
  vocab: number;
  heads: number;
  kv_heads: number;
  head_dim: number;
  dtype: string;
  parameters: number;
  kinds: LayerKind[];
  kind_of_layer: number[];
  experts: number;
  experts_per_token: number;
  state_heads: number;
  state_value_heads: number;
}

interface Asked {
  name: string;
  served: boolean;
  tp: number;
  format: string;
  gpu: string;
  tokens: number;
  layer: number;
  model: Numbers;
  degrees: { tp: number; refusal: string | null }[];
}

export interface Split extends Asked {
  refusal: null;
  dealt: Partial<Record<DealtName, Dealt>>;
  /** `room_bytes`: what is left for keys and values; negative where the rank does not fit. */
  ranks: {
    rank: number;
    weight_bytes: number;
    kv_bytes_per_token: number;
    kv_shared_with: number[];
    room_bytes: number;
  }[];
  card_bytes: number;
  replicas: number;
  idle: number;
  parts: Partial<Record<PartName, Part>>;
  cache: { token_bytes: number[]; state_bytes: number[] };
  all_reduce: { bytes: number; seconds: number; count: number; link: string; bandwidth: number };
}

export type Answer = Split | (Asked & { refusal: string });

export interface Choices {
  models: string[];
  formats: string[];
  gpus: string[];
  model: string;
  tp: number;
  gpu: string;
}

/** What the picture shows; all of it is in the address. */
export interface State {
  model: string;
  tp: number;
  format: string;
  gpu: string;
  tokens: number;
  layer: number;
  rank: number;
  /** GPUs in all; null: as many as ranks. */
  gpus: number | null;
  /** Null: nothing is stepped through yet, the whole layer is shown. */
  step: number | null;
}

function whole(text: string | null, least: number, most: number): number | null {
  return text !== null && /^\d{1,7}$/.test(text) ? Math.min(most, Math.max(least, Number(text))) : null;
}

export function readState(query: URLSearchParams, choices: Choices): State {
  return {
    model: query.get("model") ?? choices.model,
    tp: whole(query.get("tp"), 1, 1024) ?? choices.tp,
    format: query.get("format") ?? "",
    gpu: query.get("gpu") ?? choices.gpu,
    tokens: whole(query.get("tokens"), 1, 1 << 20) ?? 16,
    layer: whole(query.get("layer"), 0, 9999) ?? 0,
    rank: whole(query.get("rank"), 0, 1023) ?? 0,
    gpus: whole(query.get("gpus"), 1, 1024),
    step: whole(query.get("step"), 0, 20),
  };
}

export function writeState(state: State): URLSearchParams {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) if (value !== null && value !== "") query.set(name, String(value));
  return query;
}

/** The split that a state asks for. While the next one is on its way, the last one stays. */
export function useSplit(state: State | null): { answer: Answer | null; problem: string } {
  const [answer, setAnswer] = useState<Answer | null>(null);
  const [problem, setProblem] = useState("");
  const { model = "", tp = 0, format = "", gpu = "", tokens = 0, layer = 0, gpus = null } = state ?? {};
  useEffect(() => {
    if (!tp) return;
    const asking = new AbortController();
    const query = new URLSearchParams({ model, tp: `${tp}`, gpu, tokens: `${tokens}`, layer: `${layer}` });
    if (format) query.set("format", format);
    if (gpus) query.set("gpus", `${gpus}`);
    get<Answer>(`cockpit/layout?${query}`, asking.signal).then(
      (told) => {
        setAnswer(told);
        setProblem("");
      },
      (error) => {
        if (!asking.signal.aborted) setProblem(error instanceof ApiError ? error.message : "The server does not answer.");
      },
    );
    return () => asking.abort();
  }, [model, tp, format, gpu, tokens, layer, gpus]);
  return { answer, problem };
}
