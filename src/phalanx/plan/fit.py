"""Does it fit: the memory of every rank as a sum that a person can check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from phalanx.errors import ConfigError
from phalanx.plan.engines import (
    COLLECTIVE_BYTES,
    CONTEXT_BYTES,
    DRIVER_SHARE,
    GIB,
    GRAPH_BYTES,
    EngineTraits,
    static_reserve,
)
from phalanx.spec.cache import CacheKind, StatePlaces
from phalanx.spec.formats import FORMATS
from phalanx.spec.layout import Layout
from phalanx.spec.machine import Gpu, Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.step_memory import SYSTEM_SHARE, layer_bytes, score_bytes
from phalanx.spec.tensors import Tensor

_EXPERT_COPIES = 3
"""Copies of the routed tokens a step holds at once: gathered by expert, multiplied, and put back."""
_VALUE_BYTES = 2
_LOGIT_BYTES = 6
"""A logit in bf16 and in float32."""
_MOST_SEQUENCES = 1024


@dataclass(frozen=True)
class Line:
    """One line of the sum: what is added (or, negative, taken), and the numbers it comes from."""

    what: str
    bytes: int
    how: str


@dataclass(frozen=True)
class RankFit:
    """Memory of one rank. `lines` sum up to what is left for keys and values."""

    rank: int
    gpu: Gpu
    lines: tuple[Line, ...]
    weight_bytes: int

    @property
    def kv_bytes(self) -> int:
        """What is left for keys and values; below zero it does not fit."""
        return sum(line.bytes for line in self.lines)


@dataclass(frozen=True)
class Fit:
    """A model on `tp` ranks: what each rank holds, and what fits beside it."""

    spec: ModelSpec
    layout: Layout
    engine: EngineTraits
    ranks: tuple[RankFit, ...]
    weight_format: str
    kv_format: str
    context: int
    notes: tuple[str, ...] = ()

    @cached_property
    def tightest(self) -> RankFit:
        """The rank with the fewest tokens of room: it bounds all."""
        return min(self.ranks, key=lambda rank: rank.kv_bytes / self._sequence_bytes(rank.rank, self.context))

    def _sequence_bytes(self, rank: int, tokens: int) -> int:
        if not self.engine.has_cache_groups:
            return sum(self.layout.cache_bytes(rank, tokens, self.kv_format).values())
        spec, block = self.spec, self.engine.block_tokens
        in_windows = sum(min(tokens, group.reach - 1 + block) for group in spec.window_groups)
        kept = in_windows + (tokens if spec.keeps_all_tokens else 0)
        of_blocks = self.layout.block_bytes(rank, block, self.kv_format) * kept // block
        return of_blocks + self._state_places * _state_bytes(self.layout, rank)

    @property
    def _state_places(self) -> int:
        """That a sequence adds: its own, and those for copies of its state."""
        if not self.engine.has_cache_groups:
            return 1
        return StatePlaces.of(1, True, self.spec.drafts and not self.spec.goes_back).total - 1

    @property
    def request_bytes(self) -> dict[CacheKind, int]:
        """What the tightest rank keeps of a request of `context` tokens, by kind of layer."""
        kept = self.layout.cache_bytes(self.tightest.rank, self.context, self.kv_format)
        for cache, layers in self.spec.cache_kinds if self.engine.has_cache_groups else ():
            own = self.layout.state_bytes(cache, self.tightest.rank)
            counted = self.layout.state_bytes(replace(cache, beside_bytes=0), self.tightest.rank)
            kept[cache.kind] += layers * (self._state_places * own - counted)
        return kept

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes a token takes on the tightest rank, in a sequence of `context` tokens."""
        return self._sequence_bytes(self.tightest.rank, self.context) / self.context

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV cache holds in sequences of `context`, in whole blocks."""
        room = max(self.tightest.kv_bytes, 0) / self.kv_bytes_per_token
        return int(room) // self.engine.block_tokens * self.engine.block_tokens

    @property
    def max_sequences(self) -> int:
        """Sequences of `context` tokens that have room at once."""
        return self.kv_tokens // self.context

    @property
    def fits(self) -> bool:
        return self.max_sequences >= 1

    @cached_property
    def longest_context(self) -> int:
        """The longest single sequence: what the cache holds, up to what the model was made for."""
        room, low, high = self.tightest.kv_bytes, 0, self.spec.max_positions
        while low < high:
            middle = (low + high + 1) // 2
            if self._sequence_bytes(self.tightest.rank, middle) <= room:
                low = middle
            else:
                high = middle - 1
        return low


def fit(
    spec: ModelSpec,
    machine: Machine,
    tp: int,
    engine: EngineTraits,
    *,
    weight_format: str | None = None,
    kv_format: str = "bf16",
    context: int = 4096,
    batched_tokens: int | None = None,
    sequences: int = _MOST_SEQUENCES,
    attention_ranks: int = 1,
) -> Fit:
    """Count one replica on the machine's first `tp` GPUs.

    `context` is the length its sequences reach, `batched_tokens` the tokens of one step, `sequences` the most that
    decode at once. With `attention_ranks`, one of so many that share the experts and have all else whole.
    """
    if tp > len(machine):
        raise ConfigError("too_few_gpus", f"TP={tp} on {len(machine)} GPUs.", f"Use TP <= {len(machine)}.")
    weight_format = weight_format or spec.number_format
    layout = _layout(spec.in_format(weight_format), tp if attention_ranks == 1 else 1)
    tokens = batched_tokens or engine.batched_tokens(machine.smallest)
    ranks = tuple(
        _rank_fit(layout, rank, machine.gpus[rank], engine, weight_format, tokens, sequences, attention_ranks)
        for rank in range(layout.tp)
    )
    notes = tuple(_notes(spec, machine.take(tp), weight_format))
    return Fit(spec, layout, engine, ranks, weight_format, kv_format, min(context, spec.max_positions), notes)


def stage_of(spec: ModelSpec, stages: int) -> ModelSpec:
    """Its last layers, which are no smaller than its first, with both ends of the model: the most of a stage."""
    if stages == 1:
        return spec
    return replace(spec, layers=spec.layers[len(spec.layers) - -(-len(spec.layers) // stages) :])


@lru_cache(maxsize=256)
def _layout(spec: ModelSpec, tp: int) -> Layout:
    return Layout(spec, tp)


def _rank_fit(
    layout: Layout,
    rank: int,
    gpu: Gpu,
    engine: EngineTraits,
    weight_format: str,
    tokens: int,
    sequences: int,
    attention_ranks: int,
) -> RankFit:
    weights = weight_parts(layout, rank, weight_format)
    if attention_ranks > 1:
        weights[_EXPERTS] = tuple(-(-part // attention_ranks) for part in weights[_EXPERTS])  # type: ignore[assignment]
    activations, how = activation_bytes(layout, rank, tokens, sequences)
    held = sum(size for _, size in weights.values())
    lines = [Line(f"{gpu.name} memory", gpu.memory_bytes, "as the driver reports it"), _kept_line(gpu)]
    usable = sum(line.bytes for line in lines)
    taken = [
        Line(f"weights, {part}", -size, f"{count / 1e9:.3f} G x {size / count:.3f} B")
        for part, (count, size) in weights.items()
        if count
    ]
    ranks = layout.tp * attention_ranks
    runtime = CONTEXT_BYTES + (COLLECTIVE_BYTES if ranks > 1 else 0)
    runtime_line = Line("runtime", -runtime, "context and libraries" + (", collectives" if ranks > 1 else ""))
    activation_line = Line("activations", -activations, how)
    lines += _budget_lines(engine, gpu, usable, ranks, tokens)
    lines += taken
    if engine.budget == "all_but_a_step":
        lines.append(_worst_step_line(layout, rank, tokens, sequences))
    elif engine.budget != "static_share":
        lines.append(activation_line)
    if engine.budget != "static_share":
        lines.append(runtime_line)
    if engine.budget == "all_but_a_step":
        lines.append(
            Line("CUDA graphs", -GRAPH_BYTES, "those captured before the KV cache is sized, and those to come")
        )
    if engine.has_cache_groups and layout.spec.has_states:
        lines.append(Line("a spare state", -_state_bytes(layout, rank), "for rows that only fill up a batch"))
    narrow = layout.narrow_head(gpu.capability) if engine.has_cache_groups else None
    if narrow:
        size = layout.narrow_head_bytes(rank, gpu.capability)
        lines.append(Line("a head for drafts", -size, f"the model's own once more, in {narrow.bits} bits"))
    if engine.budget == "share_of_free":
        free = sum(line.bytes for line in lines) - GRAPH_BYTES
        lines.append(Line("CUDA graphs", -GRAPH_BYTES, "captured before the KV cache is sized"))
        lines.append(
            Line("left free", -int((1 - engine.share) * max(free, 0)), f"the cache takes {engine.share:.0%} of it")
        )
    return RankFit(rank, gpu, tuple(lines), held)


def _state_bytes(layout: Layout, rank: int) -> int:
    """What a rank keeps of a sequence whatever its length, in one place."""
    return sum(layers * layout.state_bytes(cache, rank) for cache, layers in layout.spec.cache_kinds)


def _kept_line(gpu: Gpu) -> Line:
    if gpu.unified_memory:
        kept = -int(SYSTEM_SHARE * gpu.memory_bytes)
        return Line("operating system", kept, f"{SYSTEM_SHARE:.0%} of unified memory stays with it")
    return Line("driver", -int(DRIVER_SHARE * gpu.memory_bytes), f"{DRIVER_SHARE:.2%} of it")


def _budget_lines(engine: EngineTraits, gpu: Gpu, usable: int, tp: int, tokens: int) -> list[Line]:
    """What the engine leaves alone by its own rule."""
    if engine.budget == "static_share":
        reserve = static_reserve(tp, tokens)
        share = (usable - reserve) / usable
        return [
            Line("left to activations", -reserve, f"mem_fraction_static {share:.3f}: 1.5 MiB x {tokens} tokens, graphs")
        ]
    if engine.budget == "share_of_all" and not gpu.unified_memory:
        left = int((1 - engine.share) * usable)
        return [Line("left alone", -left, f"gpu_memory_utilization {engine.share}; CUDA graphs take about 1 GiB of it")]
    if engine.budget == "all_but_a_step" and not gpu.unified_memory:
        return [Line("kept free", -int((1 - engine.share) * gpu.memory_bytes), f"{1 - engine.share:.0%} for fragments")]
    return []


def _worst_step_line(layout: Layout, rank: int, tokens: int, sequences: int) -> Line:
    """By the runtime's own reckoning: it runs such a step before it sizes the KV cache."""
    rows, spec = min(sequences, tokens), layout.spec
    layer = layer_bytes(layout, rank, tokens, _VALUE_BYTES)
    scores = score_bytes(rows, spec.vocab, tokens, tokens)
    how = f"{tokens} tokens in the widest layer" if layer > scores else f"{rows} x {spec.vocab} scores, all drawn from"
    return Line("a worst step", -max(layer, scores), how)


_EXPERTS = "experts"
_PARTS = {
    "vocab": "embedding and head",
    "query": "attention",
    "kv": "attention",
    "state": "delta nets",
    "ffn": "FFN",
    "expert_ffn": _EXPERTS,
    "shared_ffn": "shared experts",
}


def weight_parts(layout: Layout, rank: int, number_format: str) -> dict[str, tuple[int, int]]:
    """Weights a rank holds and their bytes, by what they are for."""
    parts: dict[str, tuple[int, int]] = {}
    for tensor, count in layout.spec.tensor_kinds:
        shape = layout.shape(tensor, rank)
        weights, size = parts.get(_part(tensor), (0, 0))
        held = layout.spec.tensor_bytes(tensor, shape, number_format) * count
        parts[_part(tensor)] = weights + prod(shape) * count, size + held
    return parts


def _part(tensor: Tensor) -> str:
    if tensor.split is not None:
        return _PARTS[tensor.split]
    return "attention" if tensor.is_linear else "norms and routers"


def activation_bytes(layout: Layout, rank: int, tokens: int, sequences: int) -> tuple[int, str]:
    """The most a step of `tokens` holds at once: the residual and the widest layer, or the logits of all sequences."""
    spec, shard = layout.spec, layout.shards[rank]
    stream = 2 * spec.hidden * spec.streams
    dense = 3 * len(shard.ffn)
    routed = 0
    if spec.moe is not None:
        routed = _EXPERT_COPIES * spec.moe.experts_per_token * (3 * len(shard.expert_ffn) + spec.hidden)
    attention = 2 * len(shard.query_heads) * spec.head_dim
    widest = max(dense, routed, attention)
    layer = 2 * tokens * (stream + widest)
    logits = min(sequences, tokens) * spec.vocab * _LOGIT_BYTES
    if logits > layer:
        return logits, f"{min(sequences, tokens)} x {spec.vocab} logits x {_LOGIT_BYTES} B"
    return layer, f"{tokens} tokens x ({stream} + {widest}) x 2 B"


def _notes(spec: ModelSpec, machine: Machine, weight_format: str) -> list[str]:
    notes = []
    if machine.is_mixed:
        small = machine.smallest
        unused = sum(gpu.memory_bytes - small.memory_bytes for gpu in machine.gpus)
        counted = f"{len(machine)} x {small.memory_bytes / GIB:.1f} GiB ({small.name})"
        notes.append(
            f"TP is bounded by the smallest card: {counted} count, "
            f"{unused / GIB:.1f} GiB of the larger cards stay unused."
        )
    if machine.gpus[0].unified_memory:
        notes.append(f"Unified memory: {SYSTEM_SHARE:.0%} stays with the operating system and network buffers.")
    if "fp8" in weight_format and "fp8" not in machine.smallest.peaks:
        notes.append(f"{machine.smallest.name} has no FP8 arithmetic: FP8 saves memory there, but multiplies as bf16.")
    if weight_format == "nvfp4" and "fp4" not in machine.smallest.peaks:
        notes.append(
            f"{machine.smallest.name} has no FP4 arithmetic: NVFP4 saves memory there, but multiplies as bf16."
        )
    if FORMATS[weight_format].bits < 16 and spec.quantization is None:
        notes.append(f"The model's own checkpoint is {spec.dtype}; use one that was made in {weight_format}.")
    return notes
