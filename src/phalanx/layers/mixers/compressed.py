"""Compressed attention: each rank has whole groups of heads, and all of what they look at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.kernels.compressed import Rows, Seen, attend, choose, closing, compress, cut, far, near, turn
from phalanx.kernels.fp8 import Quantised
from phalanx.kernels.gemm import Product
from phalanx.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.layers.norm import RmsNorm
from phalanx.layers.place import Part, Place
from phalanx.layers.stateless import Stateless
from phalanx.layers.step import StepContext
from phalanx.spec.compressed import Compressed
from phalanx.spec.latent import Indexer


class CompressedAttention(Stateless):
    in_graphs = False
    takes_fp8 = False

    def __init__(self, place: Place, record: Compressed, prefix: str) -> None:
        if place.fp8_cache:
            raise ConfigError(
                "unsupported_cache",
                f"kv_cache_dtype is 'fp8', which Phalanx does not keep {place.spec.model_type}'s entries in.",
                "Use kv_cache_dtype auto.",
            )
        self.record, self.path, self.eps = record, f"{prefix}{record.module}.", place.spec.norm_eps
        self.heads = len(place.shard.query_heads)
        self.enter = ColumnParallelLinear(place, [self.path + "q_a_proj", self.path + "kv_proj"])
        self.query_norm = RmsNorm(place, self.path + "q_a_norm")
        self.query = ColumnParallelLinear(place, [self.path + "q_b_proj"])
        self.norm = RmsNorm(place, self.path + "kv_norm")
        self.sinks = place.empty_for(self.path + "sinks")
        self.narrowing = place.empty_for(self.path + "o_a_proj.weight")
        self.output = RowParallelLinear(place, self.path + "o_b_proj")
        self.cache = place.empty(0, 0, record.head_dim)
        path, indexer = f"{self.path}compressor.", record.indexer
        self.compressor = Compressor(place, record, path, record.head_dim) if record.ratio else None
        self.indexer = EntryIndexer(place, record, indexer, f"{path}indexer.") if indexer else None

    @property
    def _keepers(self) -> list[Compressor | EntryIndexer]:
        return [keeper for keeper in (self.compressor, self.indexer) if keeper is not None]

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield from chain(self.enter.parts(), self.query_norm.parts(), self.query.parts(), self.norm.parts())
        yield f"{self.path}sinks", self.sinks
        yield f"{self.path}o_a_proj.weight", self.narrowing
        yield from chain(self.output.parts(), *(keeper.parts() for keeper in self._keepers))

    def products(self) -> Iterator[Product]:
        yield from (self.enter.product, self.query.product, self.output.product)

    @property
    def cache_bytes_per_token(self) -> int:
        return self.record.width * self.cache.element_size()

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        self.cache = self.cache.new_zeros(blocks, block_size, self.record.head_dim)
        for keeper in self._keepers:
            keeper.allocate_cache(blocks, block_size)

    def __call__(self, x: Tensor | Quantised, step: StepContext, rows: Tensor | None = None) -> Tensor:
        """This rank's part of what attention adds to these rows, all by default."""
        assert isinstance(x, Tensor)
        record, (cos, sin) = self.record, step.turns(self.record.rope)
        low, kept = self.enter(x).split([record.q_rank, record.head_dim], -1)
        low, kept = self.query_norm(low.contiguous()), self.norm(kept.contiguous())
        self.cache.flatten(0, 1)[step.batch.write_to] = turn(kept[:, None], cos, sin)[:, 0]
        for keeper in self._keepers:
            keeper.keep(x, step)
        q = self.query(low).view(-1, self.heads, record.head_dim)
        q = q * (q.float().square().mean(-1, keepdim=True) + self.eps).rsqrt().to(q.dtype)
        attended = turn(self._attended(turn(q, cos, sin), x, low, step), cos, -sin)
        return self._leave(attended if rows is None else attended[rows])

    def _attended(self, q: Tensor, x: Tensor, low: Tensor, step: StepContext) -> Tensor:
        record, block_size = self.record, self.cache.shape[1]
        cuts = _cuts(step, block_size)
        close = step.once(("near", record.window), lambda: [near(rows, record.window, block_size) for rows in cuts])
        out = torch.empty_like(q)
        index = self.indexer.ask(x, low, step) if self.indexer is not None else None
        for number, (rows, seen) in enumerate(zip(cuts, close, strict=True)):
            kept = self.cache.flatten(0, 1)[seen.places]
            if self.compressor is not None:
                entries = _entries(step, cuts, record.ratio, block_size)[number]
                if self.indexer is not None and index is not None:
                    entries = self.indexer.choose(rows, entries, *index)
                seen = seen.and_also(entries)
                kept = torch.cat((kept, self.compressor.entries.flatten(0, 1)[entries.places]), 1)
            out[rows.span] = attend(rows.of(q), kept, seen.allowed, self.sinks, record.scale).flatten(0, 1)
        return out

    def _leave(self, attended: Tensor) -> Tensor:
        groups = attended.view(len(attended), -1, self.narrowing.shape[1])
        narrowing = self.narrowing.view(-1, self.record.group_rank, self.narrowing.shape[1])
        return self.output(torch.einsum("tgi,gri->tgr", groups, narrowing).flatten(1))


class Compressor:
    """Whole on every rank: makes one entry of `width` numbers of every `ratio` tokens."""

    def __init__(self, place: Place, record: Compressed, path: str, width: int) -> None:
        self.record, self.path = record, path
        self.enter = ColumnParallelLinear(place, [path + "kv_proj", path + "gate_proj"])
        self.bias = place.empty_for(path + "position_bias")
        self.norm = RmsNorm(place, path + "kv_norm")
        self.inputs = place.empty(0, 0, 2 * self.bias.shape[1])
        self.entries = place.empty(0, 0, width)

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield from self.enter.parts()
        yield f"{self.path}position_bias", self.bias
        yield from self.norm.parts()

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        self.inputs = self.inputs.new_zeros(blocks, block_size, self.inputs.shape[-1])
        self.entries = self.entries.new_zeros(blocks, block_size, self.entries.shape[-1])

    def keep(self, x: Tensor, step: StepContext) -> None:
        """What entries are made from, and those entries that these tokens complete."""
        write_to, (ratio, span), block_size = step.batch.write_to, self._sizes, self.inputs.shape[1]
        cuts = _cuts(step, block_size)
        closed = step.once(("closing", ratio, span), lambda: closing(cuts, write_to, ratio, span, block_size))
        inputs = self.inputs.flatten(0, 1)
        inputs[write_to] = self.enter(x)
        if len(closed.write_to):
            made = self.norm(compress(inputs[closed.sources], closed.present, self.bias))
            turns = step.turns_at(self.record.rope, closed.positions)
            self.entries.flatten(0, 1)[closed.write_to] = turn(made[:, None], *turns)[:, 0]

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.record.ratio, self.record.span


class EntryIndexer:
    """Whole on every rank, so that all look at the same entries."""

    def __init__(self, place: Place, record: Compressed, indexer: Indexer, path: str) -> None:
        self.record, self.indexer = record, indexer
        self.scale = indexer.head_dim**-0.5 * indexer.heads**-0.5
        self.compressor = Compressor(place, record, path, indexer.head_dim)
        self.query = ColumnParallelLinear(place, [path + "q_b_proj"])
        self.weigh = ColumnParallelLinear(place, [path + "scorer.weights_proj"])
        self.keep, self.allocate_cache = self.compressor.keep, self.compressor.allocate_cache

    def parts(self) -> Iterator[tuple[str, Part]]:
        return chain(self.compressor.parts(), self.query.parts(), self.weigh.parts())

    def ask(self, x: Tensor, low: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Queries of all rows, and the weights of their heads."""
        q = self.query(low).view(-1, self.indexer.heads, self.indexer.head_dim)
        return turn(q, *step.turns(self.record.rope)), self.weigh(x).float() * self.scale

    def choose(self, rows: Rows, entries: Seen, q: Tensor, weights: Tensor) -> Seen:
        keys = self.compressor.entries.flatten(0, 1)[entries.places]
        return choose(rows.of(q), rows.of(weights), keys, entries, self.indexer.top_k)


def _cuts(step: StepContext, block_size: int) -> list[Rows]:
    return step.once("cuts", lambda: cut(step.batch, block_size))


def _entries(step: StepContext, cuts: list[Rows], ratio: int, block_size: int) -> list[Seen]:
    return step.once(("far", ratio), lambda: [far(rows, ratio, block_size) for rows in cuts])


RECORD, PART = Compressed, CompressedAttention
