import type { DealtName, LayerKind, PartName, Split } from "./data";
import { bytes, plural, seconds, shape } from "./units";

/** How a stage is drawn: the same on every rank, whole heads, a share of columns, a partial sum, or the sum itself. */
export type Drawing = "same" | "heads" | "share" | "columns" | "partial" | "sum";

export interface Stage {
  key: string;
  title: string;
  drawing: Drawing;
  says: string;
  part?: PartName;
  dealt?: DealtName;
}

export const kindOf = (split: Split): LayerKind => split.model.kinds[split.model.kind_of_layer[split.layer]!]!;

/** The heads that a layer's mixer is dealt by. */
export const mixerHeads = (split: Split): DealtName =>
  kindOf(split).mixer === "state" ? "state_heads" : "query_heads";

export const columnsOf = (split: Split): DealtName => (kindOf(split).experts ? "expert_ffn" : "ffn");

export function mixerName(kind: LayerKind): string {
  if (kind.mixer === "state") return "Gated delta net";
  if (kind.mixer === "latent") return "Latent attention";
  return kind.reach === null ? "Attention" : `Attention over ${kind.reach.toLocaleString("en-US")} tokens`;
}

/** One decoder layer, step by step. */
export function stagesOf(split: Split): Stage[] {
  const kind = kindOf(split);
  const heads = mixerHeads(split);
  const columns = columnsOf(split);
  const { experts, experts_per_token: chosen } = split.model;
  const alone = split.tp === 1;
  const sum = alone ? "With one rank there is nothing to add." : `Every rank adds up what all ${split.tp} have: afterwards all hold the same.`;
  return [
    {
      key: "input",
      title: "Input and norm",
      drawing: "same",
      says: "Every rank holds the same activations of every token, and norms them alike.",
    },
    {
      key: "qkv",
      title: kind.mixer === "state" ? "Column-parallel in" : "Column-parallel QKV",
      drawing: "heads",
      part: "mixer_in",
      dealt: heads,
      says:
        kind.mixer === "latent"
          ? "The latent is made whole on every rank; the query heads that read it are dealt."
          : "The projections are cut by columns, in whole heads: each rank computes its own heads and nobody waits.",
    },
    {
      key: "mixer",
      title: mixerName(kind),
      drawing: "share",
      dealt: heads,
      says:
        kind.mixer === "state"
          ? "Each rank carries the recurrent state of its own heads."
          : "Each rank attends with its own heads to its own part of the KV cache.",
    },
    {
      key: "o",
      title: kind.mixer === "state" ? "Row-parallel out" : "Row-parallel O",
      drawing: "partial",
      part: "mixer_out",
      says: "The output projection is cut by rows, to match: each rank gets a whole-sized but partial result.",
    },
    { key: "sum1", title: "All-reduce", drawing: "sum", says: sum },
    {
      key: "norm",
      title: "Add and norm",
      drawing: "same",
      part: "router",
      says: kind.experts
        ? `The residual is added and normed, and a router picks ${chosen} of ${experts} experts for each token, the same on every rank.`
        : "The residual is added and normed, the same on every rank.",
    },
    {
      key: "gate_up",
      title: "Column-parallel gate, up",
      drawing: "columns",
      part: "ffn_in",
      dealt: columns,
      says: kind.experts
        ? `Every rank holds its columns of all ${experts} experts, so each works on every token whatever the router picks.`
        : "Gate and up are cut by columns, in units that are never split.",
    },
    {
      key: "act",
      title: "SiLU × up",
      drawing: "share",
      dealt: columns,
      says: "Element by element on the rank's own columns: nothing moves.",
    },
    {
      key: "down",
      title: "Row-parallel down",
      drawing: "partial",
      part: "ffn_out",
      says: "Down is cut by rows, to match the columns: again a whole-sized partial result.",
    },
    { key: "sum2", title: "All-reduce", drawing: "sum", says: sum },
    {
      key: "next",
      title: split.layer + 1 < split.model.layers ? `To layer ${split.layer + 1}` : "To the head",
      drawing: "same",
      says:
        split.layer + 1 < split.model.layers
          ? "The residual is added, and the next layer begins with the same activations on every rank."
          : "The residual is added; the head deals the vocabulary, and the best token of all ranks wins.",
    },
  ];
}

export const activations = (split: Split): string => shape([split.tokens, split.model.hidden]);

/** Facts of a stage on one rank, as label and value. */
export function factsOf(stage: Stage, split: Split, rank: number): [string, string][] {
  const { all_reduce: sum, cache } = split;
  const part = stage.part && split.parts[stage.part];
  const facts: [string, string][] = [];
  if (stage.drawing === "sum")
    return [
      ["Size", `${bytes(sum.bytes)} (${activations(split)} × ${split.model.dtype})`],
      ["Time", split.tp === 1 ? "none" : `${seconds(sum.seconds)}, modelled, over ${sum.link}`],
      ["Link", `${Math.round(sum.bandwidth / 1e9).toLocaleString("en-US")} GB/s per GPU one way`],
      ["In a step", `${plural(sum.count, "all-reduce")}: ${seconds(sum.count * sum.seconds)}`],
    ];
  if (stage.drawing === "same" || stage.drawing === "partial") facts.push(["Result", activations(split)]);
  if (stage.key === "mixer") {
    if (cache.token_bytes[rank]) facts.push(["KV cache", `${bytes(cache.token_bytes[rank]!)} a token in this layer`]);
    if (cache.state_bytes[rank]) facts.push(["State", `${bytes(cache.state_bytes[rank]!)} a sequence in this layer`]);
  }
  if (stage.dealt) {
    const [start, stop] = split.dealt[stage.dealt]!.shares[rank]!;
    const result = stage.dealt.endsWith("heads")
      ? [split.tokens, (stop - start) * headWidth(split)]
      : columnsResult(split, stage.dealt, stop - start);
    if (stage.drawing === "share") facts.push(["Result", shape(result)]);
  }
  if (part) {
    const held = part.tensors.reduce((total, tensor) => total + tensor.bytes[rank]!, 0);
    facts.push(["Weights", bytes(held)], ["Time", `at least ${seconds(part.seconds)} (slowest rank, GPU at its peak)`]);
  }
  return facts;
}

/** What so many columns make of the step's tokens: of experts, once for each that a token is routed to. */
export function columnsResult(split: Split, dealt: DealtName, columns: number): number[] {
  return dealt === "expert_ffn" ? [split.tokens, split.model.experts_per_token, columns] : [split.tokens, columns];
}

function headWidth(split: Split): number {
  const out = split.parts.mixer_out!.tensors.find((tensor) => tensor.axis === 1)!;
  return out.shape[1]! / split.dealt[mixerHeads(split)]!.total;
}
