"""RankWork: what one rank reads and multiplies for a model, counted from its tensors and caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from phalanx.engine.step_sums import StepSums
from phalanx.spec.formats import FORMATS
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.tensors import Tensor

HEAD_FORMAT = "bf16"
_VALUE_BYTES = 2
_PADDING = 64
"""Rows that each expert multiplies for nothing: half a tile. With them tables of experts with many tokens are met
within 10 % in bf16 and 3 % in FP8 by block on an H100, for 14 and 8 % without; on other cards they help as well.
"""
_FLOAT_FORMATS = {"nvfp4": "fp4", "mxfp4": "mxfp4"}


@dataclass(frozen=True)
class RankWork:
    """The rank with the most to do. Bytes are of one step, FLOPs of one token.

    `cache_bytes` are read per position a decode looks at, `pair_flops` done per pair of positions of a prompt, both by
    reach (None: everything). `compute` and `expert_compute` name the format the products run in, `linear_format` and
    `expert_format` that of the weights. Of a token's FLOPs,
    `last_flops` lie behind the last attention, where only rows that yield a token go. `routed_bytes` are a token's
    activations on their way through its experts of all layers, each passed on once. `woven_layers` have latents or
    states in place of plain keys and values, and many small kernels about them. Of a layer's keys and values, the rank
    has `kv_heads`. With `attention_ranks`, each of so many ranks has whole attention layers and sequences of its own,
    and a part of the experts, who see all tokens.
    """

    layers: int
    hidden: int
    tp: int
    linear_bytes: float
    linear_flops: float
    linear_format: str
    compute: str
    expert_bytes: float
    expert_flops: float
    expert_format: str
    expert_compute: str
    experts: int
    experts_per_token: int
    sparse_layers: int
    head_bytes: float
    head_flops: float
    cache_bytes: tuple[tuple[int | None, float], ...]
    pair_flops: tuple[tuple[int | None, float], ...]
    state_bytes: float
    last_flops: float
    kv_format: str = "bf16"
    attention_ranks: int = 1
    routed_bytes: float = 0.0
    woven_layers: int = 0
    kv_heads: int = 1

    @property
    def without_experts(self) -> RankWork:
        """All that a rank does but for the experts."""
        return replace(self, experts=0, expert_bytes=0.0, expert_flops=0.0, routed_bytes=0.0, attention_ranks=1)

    def bytes_of(self, step: StepSums) -> float:
        """All that a step reads, each weight once."""
        return self.linear_bytes + self.head_bytes + self.experts_read(step.tokens) + self.cache_read(step)

    def flops_of(self, step: StepSums) -> float:
        """All that a step multiplies."""
        sampled = step.decodes + step.prompts
        whole = step.tokens * (self.linear_flops + self.expert_flops) + sampled * self.head_flops
        skipped = (step.tokens - sampled) * self.last_flops
        prompts = self.attention_flops(step.prompt_tokens, step.prompt_pairs)
        return whole - skipped + prompts + self.attention_flops(step.decodes, step.context)

    def experts_read(self, tokens: float) -> float:
        everyone = self.experts_touched(tokens * self.attention_ranks) / self.attention_ranks
        return everyone * self.expert_bytes * self.sparse_layers

    def padding(self, tokens: float) -> float:
        """Tokens more that experts multiply, since each takes whole tiles of rows: no larger than what they have."""
        if not self.experts:
            return 0.0
        touched = self.experts_touched(tokens * self.attention_ranks) / self.attention_ranks
        return min(tokens, _PADDING * touched / self.experts_per_token)

    def cache_read(self, step: StepSums) -> float:
        """What the decodes of a step look at, and their states."""
        if not step.decodes:
            return 0.0
        context = step.context / step.decodes
        positions = (size * (context if reach is None else min(context, reach)) for reach, size in self.cache_bytes)
        return step.decodes * (sum(positions) + self.state_bytes)

    def attention_flops(self, tokens: int, pairs: float) -> float:
        """Of so many tokens that attend to so many positions in all."""
        if not tokens:
            return 0.0
        context = pairs / tokens
        flops = (each * (context if reach is None else min(context, reach)) for reach, each in self.pair_flops)
        return tokens * sum(flops)

    def experts_touched(self, tokens: float) -> float:
        """Experts of a layer that at least one of so many tokens is routed to, on average over even routing."""
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)


@lru_cache(maxsize=512)
def count_work(spec: ModelSpec, tp: int, weight_format: str, kv_format: str) -> RankWork:
    """Count a model in these formats on `tp` ranks."""
    layout = Layout(spec.in_format(weight_format), tp)
    common = _Common.of(layout.spec)
    return max((_rank_work(layout, rank, weight_format, kv_format, common) for rank in range(tp)), key=_size)


def pipelined(work: RankWork, stages: int) -> RankWork:
    """The same as a pipeline of so many stages: all wait for the slowest, which has the most layers and the head."""
    if stages == 1:
        return work
    slowest = -(-work.layers // stages) * stages / work.layers
    scaled = ("linear_bytes", "linear_flops", "state_bytes", "last_flops")
    return replace(
        work,
        layers=round(work.layers * slowest),
        sparse_layers=round(work.sparse_layers * slowest),
        woven_layers=round(work.woven_layers * slowest),
        expert_flops=work.expert_flops * slowest,
        routed_bytes=work.routed_bytes * slowest,
        head_bytes=work.head_bytes * stages,
        head_flops=work.head_flops * stages,
        cache_bytes=tuple((reach, size * slowest) for reach, size in work.cache_bytes),
        pair_flops=tuple((reach, flops * slowest) for reach, flops in work.pair_flops),
        **{name: getattr(work, name) * slowest for name in scaled},
    )


def attention_parallel(spec: ModelSpec, ranks: int, weight_format: str, kv_format: str) -> RankWork:
    """One of `ranks` that share the experts, and nothing else."""
    return replace(count_work(spec, 1, weight_format, kv_format), attention_ranks=ranks)


def _size(work: RankWork) -> float:
    return work.linear_bytes + work.expert_bytes * work.experts * work.sparse_layers + work.head_bytes


@dataclass(frozen=True)
class _Common:
    """What all ranks share: numbers that layers read and pairs that they multiply, by reach and for one head, and the
    tensors behind the last attention.
    """

    reads: dict[int | None, float]
    pairs: dict[int | None, float]
    last: list[Tensor]

    @classmethod
    def of(cls, spec: ModelSpec) -> _Common:
        reads: dict[int | None, float] = {}
        pairs: dict[int | None, float] = {}
        for mixer in (layer.mixer for layer in spec.layers if layer.mixer.heads):
            for found, told in ((reads, mixer.reads), (pairs, mixer.pairs)):
                for reach, each in told:
                    found[reach] = found.get(reach, 0.0) + each
        prefix = f"model.layers.{len(spec.layers) - 1}."
        layer = [tensor for tensor in spec.stacked_tensors if tensor.name.startswith(prefix) and len(tensor.shape) > 1]
        return cls(reads, pairs, [each for each in layer if ".self_attn." not in each.name or ".o_" in each.name])


def _rank_work(layout: Layout, rank: int, weight_format: str, kv_format: str, common: _Common) -> RankWork:
    spec = layout.spec
    linear, linear_quantised, expert, head = _Sum(), _Sum(), _Sum(), _Sum()
    for tensor, count in spec.tensor_kinds:
        shape = layout.shape(tensor, rank)
        size = spec.tensor_bytes(tensor, shape, weight_format) * count
        flops = 2.0 * prod(shape) * count if len(shape) > 1 else 0.0
        if tensor.expert:
            expert.add(size, flops)
        elif tensor.split == "vocab":
            head = _Sum(size / count, flops / count)  # embedding and head have the same shape; only the head multiplies
        else:
            (linear_quantised if spec.is_quantised(tensor) else linear).add(size, flops)
    moe = spec.moe
    experts = moe.experts if moe else 0
    per_token = moe.experts_per_token if moe else 0
    sparse = len(spec.sparse)
    pairs = common.pairs.items()
    quantised_is_most = linear_quantised.flops >= linear.flops
    return RankWork(
        layers=len(spec.layers),
        hidden=spec.hidden,
        tp=layout.tp,
        linear_bytes=linear.bytes + linear_quantised.bytes,
        linear_flops=linear.flops + linear_quantised.flops,
        linear_format=weight_format if quantised_is_most else HEAD_FORMAT,
        compute=compute_format(weight_format) if quantised_is_most else HEAD_FORMAT,
        expert_bytes=expert.bytes / (experts * sparse) if sparse else 0.0,
        expert_flops=expert.flops * per_token / experts if sparse else 0.0,
        expert_format=weight_format,
        expert_compute=compute_format(weight_format),
        experts=experts,
        experts_per_token=per_token,
        sparse_layers=sparse,
        head_bytes=head.bytes,
        head_flops=head.flops,
        cache_bytes=_cache_bytes(layout, rank, kv_format, common),
        pair_flops=tuple((reach, 2.0 * len(layout.shards[rank].query_heads) * each) for reach, each in pairs),
        state_bytes=_state_bytes(layout),
        last_flops=_last_flops(layout, rank, common.last),
        kv_format=kv_format,
        routed_bytes=_VALUE_BYTES * 3.0 * sparse * per_token * (spec.hidden + len(layout.shards[rank].expert_ffn)),
        kv_heads=len(layout.shards[rank].kv_heads),
        woven_layers=sum(layer.mixer.latent or layer.mixer.state_heads > 0 for layer in spec.layers),
    )


@dataclass
class _Sum:
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, size: float, flops: float) -> None:
        self.bytes += size
        self.flops += flops


def compute_format(weight_format: str) -> str:
    """The format products run in where the card can: FP8 weights meet FP8 activations, NVFP4 and MXFP4 meet FP4 and FP8
    ones; other weights of four bits are widened to bf16 first.
    """
    if weight_format in _FLOAT_FORMATS:
        return _FLOAT_FORMATS[weight_format]
    return "fp8" if weight_format.startswith("fp8") else "bf16"


def _cache_bytes(layout: Layout, rank: int, kv_format: str, common: _Common) -> tuple[tuple[int | None, float], ...]:
    share = FORMATS[kv_format].bits / 8 * len(layout.shards[rank].kv_heads) / layout.spec.kv_heads
    return tuple((reach, each * share) for reach, each in common.reads.items())


def _state_bytes(layout: Layout) -> float:
    """Bytes of recurrent state a decode reads and writes."""
    return 2.0 * layout.spec.recurrent_bytes / layout.tp


def _last_flops(layout: Layout, rank: int, last: list[Tensor]) -> float:
    """Of a token in the last layer behind its attention: the output projection, and the experts it is routed to."""
    moe = layout.spec.moe
    share = moe.experts_per_token / moe.experts if moe is not None else 1.0
    return sum(2.0 * prod(layout.shape(each, rank)) * each.copies * (share if each.expert else 1) for each in last)
