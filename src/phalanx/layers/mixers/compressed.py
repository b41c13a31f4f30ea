"""Compressed attention: each rank has whole groups of heads, and all of what they look at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.kernels.cache import zeros
from phalanx.kernels.compressed import (
    QueryTile,
    Rows,
    SeenEntries,
    attend,
    choose,
    closing,
    compress,
    far,
    line,
    near,
    remember,
    room,
    sources,
    tiles,
    together,
    turn,
)
from phalanx.kernels.fp8 import Activations, Form
from phalanx.kernels.gemm import Product
from phalanx.kernels.indexer import choose_gpu, rows_of
from phalanx.kernels.tiling import DecodeRows
from phalanx.layers.linear import ColumnParallelLinear, RowParallelLinear, form_for
from phalanx.layers.norm import RmsNorm
from phalanx.layers.place import Part, Place
from phalanx.layers.step import StepContext
from phalanx.spec.compressed import Compressed
from phalanx.spec.latent import Indexer


class CompressedAttention:
    """Keeps entries in blocks, and the last vectors of a sequence in its place."""

    in_graphs = True

    def __init__(self, place: Place, record: Compressed, prefix: str) -> None:
        if place.fp8_cache:
            raise ConfigError(
                "unsupported_cache",
                f"kv_cache_dtype is 'fp8', which Phalanx does not keep {place.spec.model_type}'s entries in.",
                "Use kv_cache_dtype auto.",
            )
        self.record, self.path, self.eps = record, f"{prefix}{record.module}.", place.spec.norm_eps
        self.heads = len(place.shard.query_heads)
        self.by_rows = place.device.type == "cuda"
        self.enter = ColumnParallelLinear(place, [self.path + "q_a_proj", self.path + "kv_proj"])
        self.query_norm = RmsNorm(place, self.path + "q_a_norm")
        self.query = ColumnParallelLinear(place, [self.path + "q_b_proj"])
        self.norm = RmsNorm(place, self.path + "kv_norm")
        self.sinks = place.empty_for(self.path + "sinks")
        self.narrowing = place.empty_for(self.path + "o_a_proj.weight")
        self.output = RowParallelLinear(place, self.path + "o_b_proj")
        self.vectors = place.empty(0, record.ring, record.head_dim)
        path, indexer = f"{self.path}compressor.", record.indexer
        self.compressor = Compressor(place, record, path, record.head_dim) if record.ratio else None
        self.indexer = EntryIndexer(place, record, indexer, f"{path}indexer.") if indexer else None
        both = (self.compressor, self.indexer.compressor if self.indexer else None)
        self.compressors = [compressor for compressor in both if compressor is not None]

    @property
    def takes(self) -> Form:
        asked = [] if self.indexer is None else [self.indexer.weigh]
        return form_for(self.enter, *(compressor.enter for compressor in self.compressors), *asked)

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield from chain(self.enter.parts(), self.query_norm.parts(), self.query.parts(), self.norm.parts())
        yield f"{self.path}sinks", self.sinks
        yield f"{self.path}o_a_proj.weight", self.narrowing
        yield from self.output.parts()
        yield from chain.from_iterable(part.parts() for part in (self.compressor, self.indexer) if part is not None)

    def products(self) -> Iterator[Product]:
        yield from (self.enter.product, self.query.product, self.output.product)

    def block_bytes(self, block_size: int) -> int:
        return self.record.cache.block_numbers(block_size) * self.vectors.element_size()

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        for compressor in self.compressors:
            compressor.allocate_cache(blocks, block_size)

    def states(self) -> list[Tensor]:
        return [self.vectors, *(compressor.inputs for compressor in self.compressors)]

    def allocate_states(self, places: int) -> None:
        self.vectors = zeros(self.vectors, places, *self.vectors.shape[1:])
        for compressor in self.compressors:
            compressor.inputs = zeros(compressor.inputs, places, *compressor.inputs.shape[1:])

    def working_bytes(self, tokens: int, rows: int) -> int:
        """The vectors that each row of one token looks at, and what all entries are made from, in float32."""
        record = self.record
        seen = record.window + (record.indexer.top_k if record.indexer else 0)
        made = 2 * record.entry * (record.span // record.ratio) ** 2 if record.ratio else 0
        return 4 * (2 * rows * seen * record.head_dim + 2 * tokens * made)

    def __call__(self, x: Activations, step: StepContext, rows: Tensor | None = None) -> Tensor:
        """This rank's part of what attention adds to these rows, all by default."""
        record, (cos, sin) = self.record, step.turns(self.record.rope)
        low, kept = self.enter(x).split([record.q_rank, record.head_dim], -1)
        if self.by_rows:
            attended = self._attended_by_rows(x, low, kept, step)
            return self._leave(attended if rows is None else attended.index_select(0, rows))
        narrow, kept = self._normed(low), self.norm(kept.contiguous())
        lines = self._keep(turn(kept[:, None], cos, sin)[:, 0], x, step)
        q = self.query(narrow).view(-1, self.heads, record.head_dim)
        q = q * (q.float().square().mean(-1, keepdim=True) + self.eps).rsqrt().to(q.dtype)
        attended = turn(self._attended(turn(q, cos, sin), lines, x, narrow, step), cos, -sin)
        return self._leave(attended if rows is None else attended.index_select(0, rows))

    def _attended_by_rows(self, x: Activations, low: Tensor, kept: Tensor, step: StepContext) -> Tensor:
        """The same on a GPU, by its kernels: every token is a row of its own, and nothing asks the host."""
        from phalanx.kernels.gpu import compressed, compressed_rows

        record, turns, rows = self.record, step.turns(self.record.rope), _rows(step, len(low))
        vectors = compressed_rows.norm_and_turn(kept[:, None], self.norm.weight, self.norm.eps, turns)[:, 0]
        for compressor in self.compressors:
            compressor.keep_by_rows(x, step, self.block_size)
        narrow = self._normed(low)
        q = self.query(narrow).view(-1, self.heads, record.head_dim)
        q = compressed_rows.norm_and_turn(q, None, self.eps, turns)
        chosen = self.indexer.best(x, narrow, step, self.block_size) if self.indexer is not None else None
        entries = self.compressor.entries if self.compressor is not None else None
        attended = compressed.attend(
            q, vectors, self.vectors, entries, record.ratio, self.block_size, rows, record.window, chosen, self.sinks,
            record.scale,
        )  # fmt: skip
        compressed_rows.remember(self.vectors, vectors, rows)
        return compressed_rows.turn_back(attended, turns)

    def _normed(self, low: Tensor) -> Activations:
        """What queries are made of."""
        asked = [] if self.indexer is None else [self.indexer.query]
        return self.query_norm.given_as(form_for(self.query, *asked), low.contiguous())

    def _keep(self, vectors: Tensor, x: Activations, step: StepContext) -> list[Tensor]:
        """The vectors that each sequence looks at, once they, and the entries that are complete, are kept."""
        lines = []
        for rows in _together(step, self.block_size):
            lines.append(line(self.vectors, vectors, rows, self.record.window))
            remember(self.vectors, vectors, rows)
        for compressor in self.compressors:
            compressor.keep(x, step, self.block_size)
        return lines

    def _attended(self, q: Tensor, lines: list[Tensor], x: Activations, low: Activations, step: StepContext) -> Tensor:
        record, cut = self.record, _tiles(step, self.block_size)
        close = step.once(("near", record.window), lambda: [near(tile.rows, record.window) for tile in cut])
        out = torch.empty_like(q)
        index = self.indexer.ask(x, low, step) if self.indexer is not None else None
        for number, ((of, first, rows), allowed) in enumerate(zip(cut, close, strict=True)):
            kept = lines[of][:, first : first + record.window - 1 + rows.at.shape[1]]
            if self.compressor is not None:
                entries = _entries(step, record.ratio, self.block_size)[number]
                if self.indexer is not None and index is not None:
                    entries = self.indexer.choose(rows, entries, *index)
                kept = torch.cat((kept, self.compressor.entries.flatten(0, 1)[entries.places]), 1)
                allowed = torch.cat((allowed, entries.allowed), -1)
            out[rows.at] = attend(q[rows.at], kept, allowed, self.sinks, record.scale)
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
        self.inputs = place.empty(0, record.span, 2 * self.bias.shape[1])
        self.entries = place.empty(0, 0, width)

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield from self.enter.parts()
        yield f"{self.path}position_bias", self.bias
        yield from self.norm.parts()

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        self.entries = zeros(self.entries, blocks, room(block_size, self.record.ratio), self.entries.shape[-1])

    def keep(self, x: Activations, step: StepContext, block_size: int) -> None:
        """What entries are made from, and those entries that these tokens complete."""
        rows, (ratio, span) = _together(step, block_size), (self.record.ratio, self.record.span)
        closed = step.once(("closing", ratio, span), lambda: closing(rows, ratio, span, block_size))
        inputs = self.enter(x)
        if closed.found:
            made = self.norm(compress(sources(self.inputs, inputs, closed), closed.present, self.bias))
            turns = step.turns_at(self.record.rope, closed.positions)
            self.entries.flatten(0, 1)[closed.write_to] = turn(made[:, None], *turns)[:, 0]
        for each in rows:
            remember(self.inputs, inputs, each)

    def keep_by_rows(self, x: Activations, step: StepContext, block_size: int) -> None:
        """The same on a GPU."""
        from phalanx.kernels.gpu import compressed_rows

        record, inputs = self.record, self.enter(x)
        rows = _rows(step, len(inputs))
        turns = step.once(
            ("entries", record.rope, record.ratio),
            lambda: step.turns_at(record.rope, (rows.positions + (1 - record.ratio)).clamp_min(0)),
        )
        compressed_rows.compress(
            inputs, self.inputs, self.bias, self.norm.weight, self.norm.eps, turns, self.entries, rows, block_size
        )
        compressed_rows.remember(self.inputs, inputs, rows)


class EntryIndexer:
    """Whole on every rank, so that all look at the same entries."""

    def __init__(self, place: Place, record: Compressed, indexer: Indexer, path: str) -> None:
        self.record, self.indexer = record, indexer
        self.scale = indexer.head_dim**-0.5 * indexer.heads**-0.5
        self.compressor = Compressor(place, record, path, indexer.head_dim)
        self.query = ColumnParallelLinear(place, [path + "q_b_proj"])
        self.weigh = ColumnParallelLinear(place, [path + "scorer.weights_proj"])

    def parts(self) -> Iterator[tuple[str, Part]]:
        return chain(self.compressor.parts(), self.query.parts(), self.weigh.parts())

    def ask(self, x: Activations, low: Activations, step: StepContext) -> tuple[Tensor, Tensor]:
        """Queries of all rows, and the weights of their heads."""
        q = self.query(low).view(-1, self.indexer.heads, self.indexer.head_dim)
        return turn(q, *step.turns(self.record.rope)), self.weigh(x).float() * self.scale

    def best(self, x: Activations, low: Activations, step: StepContext, block_size: int) -> Tensor | None:
        """The entries that each row looks at, the best first; None where those are all that there can be."""
        from phalanx.kernels.gpu import compressed_rows

        q = self.query(low).view(-1, self.indexer.heads, self.indexer.head_dim)
        q, weights = compressed_rows.turn(q, step.turns(self.record.rope)), self.weigh(x).float() * self.scale
        rows, keys = _rows(step, len(q)), self.compressor.entries
        found = choose_gpu(q, weights, keys, rows, self.indexer.top_k, self.record.ratio, block_size)
        return None if found is None else found.positions

    def choose(self, rows: Rows, entries: SeenEntries, q: Tensor, weights: Tensor) -> SeenEntries:
        keys = self.compressor.entries.flatten(0, 1)[entries.places]
        return choose(q[rows.at], weights[rows.at], keys, entries, self.indexer.top_k)


def _rows(step: StepContext, tokens: int) -> DecodeRows:
    return step.once("rows", lambda: rows_of(step.batch, tokens))


def _together(step: StepContext, block_size: int) -> list[Rows]:
    return step.once("together", lambda: together(step.batch, block_size))


def _tiles(step: StepContext, block_size: int) -> list[QueryTile]:
    return step.once("tiles", lambda: tiles(_together(step, block_size)))


def _entries(step: StepContext, ratio: int, block_size: int) -> list[SeenEntries]:
    cut = _tiles(step, block_size)
    return step.once(("far", ratio), lambda: [far(tile.rows, ratio, block_size) for tile in cut])


RECORD, PART = Compressed, CompressedAttention
