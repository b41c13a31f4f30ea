"""Work: what one rank reads and multiplies for a model, counted from its tensors and caches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from phalanx.spec.formats import FORMATS
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

HEAD_FORMAT = "bf16"


@dataclass(frozen=True)
class Work:
    """The rank with the most to do. Bytes are of one step, FLOPs of one token.

    `cache_bytes` are read per position a decode looks at, `pair_flops` done per pair of positions of a prompt, both by
    reach (None: everything). `compute` and `expert_compute` name the format the products run in.
    """

    layers: int
    hidden: int
    tp: int
    linear_bytes: float
    linear_flops: float
    compute: str
    expert_bytes: float
    expert_flops: float
    expert_compute: str
    experts: int
    experts_per_token: int
    sparse_layers: int
    head_bytes: float
    head_flops: float
    cache_bytes: tuple[tuple[int | None, float], ...]
    pair_flops: tuple[tuple[int | None, float], ...]
    state_bytes: float

    def experts_touched(self, tokens: float) -> float:
        """Experts of a layer that at least one of so many tokens is routed to, on average over even routing."""
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)


@lru_cache(maxsize=512)
def count_work(spec: ModelSpec, tp: int, weight_format: str, kv_format: str) -> Work:
    """Count a model in these formats on `tp` ranks."""
    layout = Layout(spec.in_format(weight_format), tp)
    return max((_rank_work(layout, rank, weight_format, kv_format) for rank in range(tp)), key=_size)


def _size(work: Work) -> float:
    return work.linear_bytes + work.expert_bytes * work.experts * work.sparse_layers + work.head_bytes


def _rank_work(layout: Layout, rank: int, weight_format: str, kv_format: str) -> Work:
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
    sparse = len(moe.sparse_layers) if moe else 0
    quantised_is_most = linear_quantised.flops >= linear.flops
    return Work(
        layers=spec.layers,
        hidden=spec.hidden,
        tp=layout.tp,
        linear_bytes=linear.bytes + linear_quantised.bytes,
        linear_flops=linear.flops + linear_quantised.flops,
        compute=compute_format(weight_format) if quantised_is_most else HEAD_FORMAT,
        expert_bytes=expert.bytes / (experts * sparse) if sparse else 0.0,
        expert_flops=expert.flops * per_token / experts if sparse else 0.0,
        expert_compute=compute_format(weight_format),
        experts=experts,
        experts_per_token=per_token,
        sparse_layers=sparse,
        head_bytes=head.bytes,
        head_flops=head.flops,
        cache_bytes=_cache_bytes(layout, rank, kv_format),
        pair_flops=_pair_flops(layout, rank),
        state_bytes=_state_bytes(layout),
    )


@dataclass
class _Sum:
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, size: float, flops: float) -> None:
        self.bytes += size
        self.flops += flops


def compute_format(weight_format: str) -> str:
    """The format products run in: FP8 weights meet FP8 activations, weights of four bits are widened to bf16 first."""
    return "fp8" if weight_format.startswith("fp8") else "bf16"


def _cache_bytes(layout: Layout, rank: int, kv_format: str) -> tuple[tuple[int | None, float], ...]:
    spec = layout.spec
    element = FORMATS[kv_format].bits / 8
    share = len(layout.shards[rank].kv_heads) / spec.kv_heads
    found: dict[int | None, float] = {}
    for cache in spec.caches:
        if cache.kind == "state":
            continue
        width = spec.mla.width if spec.mla else cache.heads * cache.width
        reach = spec.indexer.top_k if spec.indexer else cache.reach
        found[reach] = found.get(reach, 0.0) + width * element * share
    return tuple(found.items())


def _pair_flops(layout: Layout, rank: int) -> tuple[tuple[int | None, float], ...]:
    spec = layout.spec
    value_dim = spec.mla.v_dim if spec.mla else spec.head_dim
    flops = 2.0 * len(layout.shards[rank].query_heads) * (spec.head_dim + value_dim)
    found: dict[int | None, float] = {}
    for cache in spec.caches:
        if cache.kind != "state":
            found[cache.reach] = found.get(cache.reach, 0.0) + flops
    return tuple(found.items())


def _state_bytes(layout: Layout) -> float:
    """Bytes of recurrent state a decode reads and writes."""
    return 2.0 * sum(cache.state_bytes for cache in layout.spec.caches) / layout.tp
