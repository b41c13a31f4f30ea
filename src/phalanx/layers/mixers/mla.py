"""Latent attention: each rank has some of the heads, and all of the latents."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch.nn.functional as F
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.kernels.cache import zeros
from phalanx.kernels.fp8 import Activations, Form
from phalanx.kernels.gemm import Product
from phalanx.kernels.indexer import choose
from phalanx.kernels.latent import Heads, keep_latents, latent_attention
from phalanx.kernels.rotary import apply_rotary
from phalanx.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, form_for
from phalanx.layers.norm import RmsNorm
from phalanx.layers.place import Part, Place
from phalanx.layers.stateless import Stateless
from phalanx.layers.step import StepContext
from phalanx.spec.latent import Indexer, Mla

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the configuration says of the others."""


class LatentAttention(Stateless):
    in_graphs = True

    def __init__(self, place: Place, record: Mla, prefix: str) -> None:
        if place.fp8_cache:
            raise ConfigError(
                "unsupported_cache",
                f"kv_cache_dtype is 'fp8', which Phalanx does not keep {place.spec.model_type}'s latents in.",
                "Use kv_cache_dtype auto.",
            )
        self.record, self.path = record, f"{prefix}{record.module}."
        self.heads = len(place.shard.query_heads)
        entering = ["q_a_proj"] if record.q_rank else []
        self.enter = ColumnParallelLinear(place, [self.path + name for name in (*entering, "kv_a_proj_with_mqa")])
        self.query_norm = RmsNorm(place, self.path + "q_a_layernorm", _LATENT_EPS) if record.q_rank else None
        self.query = ColumnParallelLinear(place, [self.path + ("q_b_proj" if record.q_rank else "q_proj")])
        self.latent_norm = RmsNorm(place, self.path + "kv_a_layernorm", _LATENT_EPS)
        self.widening = place.empty_for(self.path + "kv_b_proj.weight")
        self.output = RowParallelLinear(place, self.path + "o_proj")
        self.cache = place.empty_cache(record.width)
        indexer = record.indexer
        self.indexer = LightningIndexer(place, record, indexer, f"{self.path}indexer.") if indexer else None

    @property
    def takes(self) -> Form:
        asked = [] if self.indexer is None else self.indexer.of_input
        return form_for(self.enter, *asked, *([self.query] if self.query_norm is None else []))

    def parts(self) -> Iterator[tuple[str, Part]]:
        norms = [norm for norm in (self.query_norm, self.latent_norm) if norm is not None]
        yield from chain(self.enter.parts(), self.query.parts(), *(norm.parts() for norm in norms))
        yield f"{self.path}kv_b_proj.weight", self.widening
        yield from self.output.parts()
        if self.indexer is not None:
            yield from self.indexer.parts()

    def linears(self) -> Iterator[Linear]:
        """All but the widening of latents, which attention takes into its own products."""
        yield from (self.enter, self.query, self.output)

    def products(self) -> Iterator[Product]:
        yield from (linear.product for linear in self.linears())

    def block_bytes(self, block_size: int) -> int:
        index = self.indexer.block_bytes(block_size) if self.indexer else 0
        return block_size * self.record.width * self.cache.element_size() + index

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        self.cache = zeros(self.cache, blocks, block_size, self.record.width)
        if self.indexer is not None:
            self.indexer.allocate_cache(blocks, block_size)

    def __call__(self, x: Activations, step: StepContext, rows: Tensor | None = None) -> Tensor:
        """This rank's part of what attention adds to these rows, all by default."""
        record, adapters = self.record, step.adapters_of(None)
        first, entered = self.enter(x, adapters).split([record.q_rank or 0, record.width], -1)
        low = x if self.query_norm is None else self._normed(first, step)
        turns = step.turns(record.rope)
        kept = keep_latents(entered, self.latent_norm.weight, _LATENT_EPS, turns, step.batch.write_to, self.cache)
        q = self.query(low, adapters).view(-1, self.heads, record.head_dim)
        if self.indexer is not None:
            self.indexer(x, low, step)
        chosen = step.chosen if self.indexer is not None else None
        heads = Heads(self.widening.view(self.heads, -1, record.kv_rank), record.nope_dim)
        attended = latent_attention(q, turns, kept, self.cache, step.batch, heads, record.scale, chosen).flatten(1)
        return self.output(attended if rows is None else attended.index_select(0, rows), step.adapters_of(rows))

    def _normed(self, x: Tensor, step: StepContext) -> Activations:
        assert self.query_norm is not None
        asked = [] if self.indexer is None else self.indexer.of_low
        return self.query_norm.given_as(step.form(form_for(self.query, *asked)), x)


class LightningIndexer:
    """Whole on every rank, so that all look at the same positions."""

    def __init__(self, place: Place, record: Mla, indexer: Indexer, path: str) -> None:
        self.record, self.indexer, self.path, self.dtype = record, indexer, path, place.dtype
        self.scale = indexer.head_dim**-0.5 * indexer.heads**-0.5
        if indexer.own:
            self.query = ColumnParallelLinear(place, [path + "wq_b"])
            self.key = ColumnParallelLinear(place, [path + "wk"])
            self.weigh = ColumnParallelLinear(place, [path + "weights_proj"])
            self.norm_weight = place.empty_for(path + "k_norm.weight")
            self.norm_bias = place.empty_for(path + "k_norm.bias")
            self.cache = place.empty(0, 0, indexer.head_dim)

    @property
    def of_input(self) -> list[Linear]:
        """What it makes of the input of attention."""
        return [self.key, self.weigh] if self.indexer.own else []

    @property
    def of_low(self) -> list[Linear]:
        """What it makes of that which queries are made of."""
        return [self.query] if self.indexer.own else []

    def parts(self) -> Iterator[tuple[str, Part]]:
        if self.indexer.own:
            yield from chain(self.query.parts(), self.key.parts(), self.weigh.parts())
            yield f"{self.path}k_norm.weight", self.norm_weight
            yield f"{self.path}k_norm.bias", self.norm_bias

    def block_bytes(self, block_size: int) -> int:
        return block_size * self.indexer.head_dim * self.cache.element_size() if self.indexer.own else 0

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        if self.indexer.own:
            self.cache = zeros(self.cache, blocks, block_size, self.indexer.head_dim)

    def __call__(self, x: Activations, low: Activations, step: StepContext) -> None:
        """Leave the choice with the step; without an indexer of its own a layer leaves the last one's there."""
        if not self.indexer.own:
            return
        width, (cos, sin) = self.indexer.head_dim, step.turns(self.record.rope)
        key = F.layer_norm(self.key(x), (width,), self.norm_weight, self.norm_bias, _LATENT_EPS)
        self.cache.flatten(0, 1)[step.batch.write_to] = apply_rotary(key[:, None], cos, sin)[:, 0]
        q = apply_rotary(self.query(low).view(-1, self.indexer.heads, width), cos, sin)
        weights = self.weigh(x).float() * self.scale
        step.chosen = choose(q, weights, self.cache, step.batch, self.indexer.top_k, self.dtype)


RECORD, PART = Mla, LatentAttention
