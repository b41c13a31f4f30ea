/** What the planner answers: the record of `phalanx plan --json`, and what it knows. */
export interface Interval {
  mid: number;
  low: number;
  high: number;
}

export interface Candidate {
  engine: string;
  tp: number;
  replicas: number;
  gpus: number;
  expert_parallel: boolean;
  weight_format: string;
  kv_format: string;
  meets_slo: boolean;
  ttft_ms: Interval;
  tpot_ms: Interval;
  ttft_p50_ms: number;
  ttft_p95_ms: number;
  ttft_p99_ms: number;
  tpot_p50_ms: number;
  tpot_p95_ms: number;
  tpot_p99_ms: number;
  is_held: boolean;
  capacity_requests_per_s: number | null;
  tokens_per_s: Interval;
  tokens_per_s_per_gpu: number;
  usd_per_million_tokens: number | null;
  weights_gib_per_gpu: number;
  kv_gib_per_gpu: number;
  kv_tokens: number;
  max_sequences: number;
  longest_context: number;
  all_reduce_share: number;
  preemptions: number;
}

export interface Degree extends Candidate {
  scaling_efficiency: number;
}

export interface Excluded {
  engine: string;
  tp: number;
  weight_format: string;
  code: string;
  found: string;
  fix: string;
}

export interface Line {
  what: string;
  bytes: number;
  how: string;
}

export interface Rank {
  rank: number;
  gpu: string;
  lines: Line[];
  weight_bytes: number;
  kv_bytes: number;
}

export interface Fit {
  ranks: Rank[];
  tightest_rank: number;
  kv_bytes_per_token: number;
  kv_tokens: number;
  notes: string[];
}

export interface Cost {
  usd_per_hour: { rent: [number, number, number] | null; reserved: number | null; owned: number | null };
  purchase_usd: number | null;
  break_even_utilisation: number | null;
  usd_per_million_tokens: number | null;
  basis: string;
  prices_as_of: string[];
}

export interface Power {
  sustained: number;
  limit: number;
  transient: number;
  hint: string;
}

export interface PlanRecord {
  model: {
    name: string;
    parameters: number;
    active_parameters: number;
    layers: number;
    kv_bytes_per_token: number;
    max_positions: number;
  };
  machine: string;
  workload: {
    input_tokens: number;
    output_tokens: number;
    concurrency: number;
    rate: number | null;
    spread: number;
    context: number;
  };
  slo_ms: { ttft: number | null; tpot: number | null };
  meets_slo: boolean;
  explanation: string;
  advice: string[];
  best: Candidate | null;
  fit: Fit | null;
  side_by_side: Degree[];
  candidates: Candidate[];
  excluded: Excluded[];
  cost: Cost | null;
  power_w: Power | null;
  command: string[] | null;
  prepare: string[];
  note: string;
  verdict: string;
  day: string | null;
  scaling: ScalingPoint[];
}

/** A TP degree at the same batch a replica. */
export interface ScalingPoint {
  tp: number;
  batch: number;
  tokens_per_s: number;
  ideal_tokens_per_s: number;
  efficiency: number;
  bound: string;
  shares: Record<string, number>;
}

/** One machine of a comparison. */
export interface Compared {
  machine: string;
  memory_gib: number;
  kept_gib: Record<string, number>;
  effective_gib: number;
  formats: string[];
  best: string | null;
  tokens_per_s: number | null;
  ttft_ms: number | null;
  tpot_ms: number | null;
  usd_per_million_tokens: number | null;
  usd_per_hour: number | null;
  purchase_usd: number | null;
  power_w: number | null;
  meets_slo: boolean;
  readiness: string;
  good_and_bad: string;
  verdict: string;
}

export interface Catalog {
  models: {
    name: string;
    id: string;
    parameters: number;
    active_parameters: number;
    max_positions: number;
    format: string;
    served_by_phalanx: boolean;
  }[];
  gpus: Gpu[];
  engines: { name: string; title: string; version: string; formats: string[]; kv_formats: string[] }[];
  machines: string[];
  most_gpus: number;
  networks: string[];
  recipes: string[];
  systems: { name: string; title: string; engines: string[]; note: string }[];
}

export interface Gpu {
  name: string;
  vendor: string;
  architecture: string;
  memory_gib: number;
  unified_memory: boolean;
  link: string;
  link_gbs: number;
  link_gpus: number;
  beyond: string;
  beyond_gbs: number;
}

export interface Point {
  tp: number;
  replicas: number;
  concurrency: number;
  tokens_per_s_per_gpu: number;
  tokens_per_s_per_user: number;
  ttft_ms: number;
  on_front: boolean;
}

export interface Way {
  format: string;
  tp: number;
  widest_tp: number;
  weights_gib_per_gpu: number;
  kv_tokens: number;
  longest_context: number;
  max_sequences: number;
  max_tokens_per_s_per_user: number;
}

export interface Fitting {
  model: string;
  parameters: number;
  active_parameters: number;
  ways: Way[];
  why_not: string | null;
}
