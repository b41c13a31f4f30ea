"""Grouped-query attention; each rank holds whole KV-head groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from phalanx.kernels.activation import sigmoid_and_mul, sigmoid_and_mul_quantised
from phalanx.kernels.attention import (
    AttentionBatch,
    Sight,
    SightMasks,
    paged_attention,
    paged_attention_quantised,
    takes_fresh,
)
from phalanx.kernels.cache import UNSCALED, Fresh, HeadNorms, store, zeros
from phalanx.kernels.fp8 import Activations, Form
from phalanx.kernels.gemm import Product
from phalanx.kernels.invariant import invariant_attention
from phalanx.kernels.norm import add_rms_norm_torch
from phalanx.kernels.rotary import apply_rotary, norm_heads, rotate_and_store
from phalanx.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, form_for
from phalanx.layers.norm import RmsNorm
from phalanx.layers.place import Part, Place
from phalanx.layers.stateless import Stateless
from phalanx.layers.step import StepContext
from phalanx.spec.attention import Gqa


class Attention(Stateless):
    def __init__(self, place: Place, record: Gqa, prefix: str) -> None:
        self.record = record
        self.group = place.group
        self.invariant = place.units is not None
        self.path = f"{prefix}{record.module}."
        self.eps = place.spec.norm_eps
        self.heads, self.kv_heads = len(place.shard.query_heads), len(place.shard.kv_heads)
        self.qkv = ColumnParallelLinear(place, [f"{self.path}{letter}_proj" for letter in "qkv"])
        self.gate = ColumnParallelLinear(place, [f"{self.path}q_gate"]) if record.gated else None
        self.output = RowParallelLinear(place, self.path + "o_proj")
        self.widths = torch.tensor([record.heads, record.kv_heads], device=place.device) * record.head_dim
        self._holders = sum(shard.kv_heads == place.shard.kv_heads for shard in place.layout.shards)
        has_norms = record.head_norm in ("each", "whole")
        self.norms = [RmsNorm(place, self.path + name) for name in ("q_norm", "k_norm")] if has_norms else []
        self.sinks = place.empty_for(self.path + "sinks") if record.sinks else None
        self.sight = Sight(record.window, record.chunked, self.sinks)
        self.cache = place.empty_cache(2, self.kv_heads, record.head_dim)
        self.cache_scales = UNSCALED
        self.cache_group = 0

    @property
    def takes(self) -> Form:
        return form_for(self.qkv, *([] if self.gate is None else [self.gate]))

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield from self.qkv.parts()
        if self.gate is not None:
            yield from self.gate.parts()
        yield from chain.from_iterable(norm.parts() for norm in self.norms)
        yield from self.output.parts()
        if self.sinks is not None:
            yield f"{self.path}sinks", self.sinks

    def linears(self) -> Iterator[Linear]:
        yield from (linear for linear in (self.qkv, self.gate, self.output) if linear is not None)

    def products(self) -> Iterator[Product]:
        yield from (linear.product for linear in (self.qkv, self.gate, self.output) if linear is not None)

    def block_bytes(self, block_size: int) -> int:
        return block_size * 2 * self.kv_heads * self.record.head_dim * self.cache.element_size()

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        self.cache = zeros(self.cache, blocks, block_size, 2, self.kv_heads, self.record.head_dim)

    def join_group(self, group: int, other: Attention) -> None:
        """Keep tokens in the blocks of this group, in the memory of a layer of another one."""
        self.cache_group, self.cache = group, other.cache

    @property
    def in_graphs(self) -> bool:
        """Whether a GPU computes it without asking the host."""
        return self.sight.is_plain or self.invariant

    def __call__(self, x: Activations, step: StepContext, rows: Tensor | None = None) -> Tensor:
        """This rank's part of what attention adds to these rows, all by default."""
        qkv = self.qkv(x, step.adapters_of(None)).view(-1, self.heads + 2 * self.kv_heads, self.record.head_dim)
        fresh = self._fresh(qkv, step)
        if fresh is None:
            self._turn_and_store(qkv, step)
        adapters = step.adapters_of(rows)
        in_fp8 = self.output.product.takes_fp8 and adapters is None
        if in_fp8 and rows is None and self.gate is None:
            return self.output(paged_attention_quantised(*self._asked(qkv, step), fresh))
        attended = self._attended(qkv, step, fresh)
        if self.gate is None:
            return self.output(attended if rows is None else attended.index_select(0, rows), adapters)
        gate = self.gate(x, step.adapters_of(None))
        if rows is not None:
            attended, gate = attended.index_select(0, rows), gate.index_select(0, rows)
        gated = sigmoid_and_mul_quantised if in_fp8 else sigmoid_and_mul
        return self.output(gated(attended, gate), adapters)

    def _asked(
        self, qkv: Tensor, step: StepContext
    ) -> tuple[Tensor, int, Tensor, AttentionBatch, SightMasks, Sight, float, float]:
        batch, (key, value) = step.batch.of(self.cache_group), self.cache_scales
        return qkv, self.heads, self.cache, batch, step.masks, self.sight, self.record.scale * key, value

    def _attended(self, qkv: Tensor, step: StepContext, fresh: Fresh | None) -> Tensor:
        """The heads of a token side by side."""
        asked = self._asked(qkv, step)
        if not self.invariant:
            return paged_attention(*asked, fresh).flatten(1)
        _, heads, cache, batch, masks, sight, scale, _ = asked
        assert batch.decode is not None
        return invariant_attention(qkv[:, :heads], cache, batch.decode, masks, sight, scale).flatten(1)

    def _fresh(self, qkv: Tensor, step: StepContext) -> Fresh | None:
        """What attention does itself of what else is done before it."""
        batch, rope = step.batch.of(self.cache_group), self.record.rope
        if rope is None or self.record.head_norm is not None or self.invariant:
            return None
        if not takes_fresh(batch, self.cache, self.sight, qkv.dtype):
            return None
        return Fresh(*step.turns(rope), batch.write_to, self.cache_scales)

    def _turn_and_store(self, qkv: Tensor, step: StepContext) -> None:
        """Queries and keys normed and turned in place, keys and values written to the cache."""
        record, write_to = self.record, step.batch.of(self.cache_group).write_to
        if record.rope is not None and record.head_norm in (None, "each"):
            cos, sin = step.turns(record.rope)
            rotate_and_store(
                qkv,
                cos,
                sin,
                write_to,
                self.cache,
                self.heads,
                self.kv_heads,
                self._each_head(),
                self.cache_scales,
                steady=self.invariant,
            )
            return
        turned = qkv[:, : self.heads + self.kv_heads]
        if record.head_norm == "each":
            norm_heads(qkv, self.heads, self.kv_heads, self._head_norms())
        elif record.head_norm == "whole":
            self._norm_whole(qkv)
        if record.rope is not None:
            turned.copy_(apply_rotary(turned, *step.turns(record.rope)))
        if record.head_norm == "after_rope":
            turned.copy_(add_rms_norm_torch(turned, None, turned.new_ones(record.head_dim), self.eps))
        if record.temperature is not None:
            self._cool(qkv[:, : self.heads], step)
        store(self.cache, write_to, qkv[:, self.heads :].unflatten(1, (2, self.kv_heads)), self.cache_scales)

    def _each_head(self) -> HeadNorms | None:
        return self._head_norms() if self.norms else None

    def _head_norms(self) -> HeadNorms:
        query, key = (norm.weight for norm in self.norms)
        return HeadNorms(query, key, self.eps)

    def _norm_whole(self, qkv: Tensor) -> None:
        """Over all queries, or keys, of a token, whichever rank has them; a KV head that several have counts once."""
        sizes = (self.heads, self.kv_heads)
        split = qkv[:, : sum(sizes)].float().split(sizes, dim=1)
        squares = torch.stack([part.pow(2).sum((1, 2)) for part in split])
        squares[1] /= self._holders
        spread = (self.group.all_reduce(squares) / self.widths[:, None] + self.eps).rsqrt()
        for part, norm, factor in zip(split, self.norms, spread, strict=True):
            start = 0 if norm is self.norms[0] else self.heads
            normed = norm.weight * (part * factor[:, None, None]).flatten(1).to(qkv.dtype)
            qkv[:, start : start + part.shape[1]] = normed.view(part.shape)

    def _cool(self, queries: Tensor, step: StepContext) -> None:
        temperature = self.record.temperature
        assert temperature is not None
        floors = torch.floor((step.positions.float() + 1.0) / temperature.floor)
        queries.mul_((torch.log1p(floors) * temperature.scale + 1.0)[:, None, None].to(queries.dtype))


RECORD, PART = Gqa, Attention
