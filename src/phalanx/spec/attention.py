"""Grouped-query attention: what it holds, keeps and costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.spec.cache import CacheKind, LayerCache, Reach
from phalanx.spec.rope import Rope
from phalanx.spec.tensors import Pairs, Run, Split, Stored, Tensor

HeadNorm = Literal["each", "whole", "after_rope"]
"""Queries and keys are normed head by head, all heads of a token together, or, without weights, once rotated."""


class Temperature(NamedTuple):
    """Queries grow with their position: by 1 + `scale` * log(1 + (position + 1) // `floor`)."""

    scale: float
    floor: int


@dataclass(frozen=True)
class Gqa:
    """Query heads share KV heads in groups.

    A token looks back on all positions, on the last `window`, or, where `chunked`, on those of its own chunk of
    `window` positions. `gated`: what is attended passes a gate made from the layer's input. `sinks`: a score a head
    that takes part in the softmax and adds nothing. `fused` is the one tensor that checkpoints keep q, k and v in,
    where they do. `interleaved`: the checkpoint's rotary pairs lie side by side.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float
    window: int | None = None
    chunked: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: HeadNorm | None = None
    norm_plus: float = 0.0
    sinks: bool = False
    gated: bool = False
    temperature: Temperature | None = None
    interleaved: bool = False
    fused: str | None = None
    module: str = "self_attn"

    latent = False
    head_group = 1
    state_heads = 0
    state_value_heads = 0

    def __post_init__(self) -> None:
        if self.rope is not None:
            self.rope.check_within(self.head_dim)

    @property
    def cache(self) -> LayerCache:
        kind: CacheKind = "full" if self.window is None else "chunked" if self.chunked else "sliding"
        return LayerCache(kind, self.kv_heads, 2 * self.head_dim, self.window)

    @property
    def reads(self) -> tuple[Reach, ...]:
        return (Reach(self.window, 2 * self.kv_heads * self.head_dim),)

    @property
    def pairs(self) -> tuple[Reach, ...]:
        return (Reach(self.window, 2 * self.head_dim),)

    def tensors(self, prefix: str, hidden: int) -> Iterator[Tensor]:
        path = f"{prefix}{self.module}."
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield from self._projection(path, "q_proj", query, hidden, "query", 0)
        if self.gated:
            yield from self._gate(path, query, hidden)
        yield from self._projection(path, "k_proj", kv, hidden, "kv", query)
        yield from self._projection(path, "v_proj", kv, hidden, "kv", query + kv)
        yield from self._norms(path, query, kv)
        if self.sinks:
            yield Tensor(path + "sinks", (self.heads,), "query", wide=True)
        yield Tensor(path + "o_proj.weight", (hidden, query), "query", axis=1, is_linear=True)
        if self.output_bias:
            yield Tensor(path + "o_proj.bias", (hidden,))

    def _projection(self, path: str, name: str, rows: int, hidden: int, split: Split, first: int) -> Iterator[Tensor]:
        stored, run = path + name, None
        if self.fused:
            stored = path + self.fused
            run = Run(rows, (self.heads + 2 * self.kv_heads) * self.head_dim, first)
        elif self.gated and split == "query":
            run = Run(self.head_dim, 2 * self.head_dim)
        turned = self.interleaved and self.rope is not None and name != "v_proj"
        pairs = Pairs(self.head_dim, 0, self.rope.rotary_dim) if turned and self.rope else None
        weight = (Stored(f"{stored}.weight", run=run),) if run else ()
        bias = (Stored(f"{stored}.bias", run=run),) if run else ()
        yield Tensor(f"{path}{name}.weight", (rows, hidden), split, is_linear=True, sources=weight, pairs=pairs)
        if self.qkv_bias:
            yield Tensor(f"{path}{name}.bias", (rows,), split, sources=bias, pairs=pairs)

    def _gate(self, path: str, rows: int, hidden: int) -> Iterator[Tensor]:
        """Checkpoints keep the gate's rows of each head behind the query's."""
        run = Run(self.head_dim, 2 * self.head_dim, self.head_dim)
        source = Stored(f"{path}q_proj.weight", run=run)
        yield Tensor(f"{path}q_gate.weight", (rows, hidden), "query", is_linear=True, sources=(source,))
        if self.qkv_bias:
            source = Stored(f"{path}q_proj.bias", run=run)
            yield Tensor(f"{path}q_gate.bias", (rows,), "query", sources=(source,))

    def _norms(self, path: str, query: int, kv: int) -> Iterator[Tensor]:
        splits: tuple[tuple[str, int, Split], ...] = (("q_norm", query, "query"), ("k_norm", kv, "kv"))
        for name, rows, split in splits if self.head_norm in ("each", "whole") else ():
            whole = self.head_norm == "whole"
            sources = (Stored(f"{path}{name}.weight", plus=self.norm_plus),) if self.norm_plus else ()
            shape = (rows if whole else self.head_dim,)
            wide = bool(self.norm_plus)
            yield Tensor(f"{path}{name}.weight", shape, split if whole else None, sources=sources, wide=wide)
