"""Attention to a window of vectors, and to entries that stand for many tokens each.

Entries lie in blocks, each in that of the token that completes it. Of what only the last tokens are needed for, vectors
and what the next entry is made from, a sequence has a ring in its place: a token's lies at its position modulo the
ring's size. So a prompt may be cut anywhere, and goes on elsewhere from the blocks and a copy of the rings.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.spans import additive, spans
from phalanx.kernels.tiling import PROMPT_TILE


class Rows(NamedTuple):
    """Rows of a step that are computed together: of some sequences, as many of each, one behind the other.

    `at` are their numbers and `positions` where in the sequence they are, all below `end`: [sequences, queries].
    `tables` are [sequences, blocks]; `places` are those of their rings.
    """

    at: Tensor
    positions: Tensor
    end: int
    tables: Tensor
    places: Tensor

    def only(self, sequences: Tensor) -> Rows:
        at, positions, end, tables, places = self
        return Rows(at[sequences], positions[sequences], end, tables[sequences], places[sequences])

    def tile(self, first: int, count: int) -> Rows:
        """Some of the queries of each."""
        span, left = slice(first, first + count), self.at.shape[1] - first - count
        return self._replace(at=self.at[:, span], positions=self.positions[:, span], end=self.end - left)


class QueryTile(NamedTuple):
    """Queries from `first` on of the rows of this number."""

    number: int
    first: int
    rows: Rows


class SeenEntries(NamedTuple):
    """Places in the flattened cache, [sequences, places], and who may look there, [sequences, queries, places]."""

    places: Tensor
    allowed: Tensor


class Closing(NamedTuple):
    """Entries that tokens of a step complete: the rows of sequences that do, with the number of the sequence and of the
    query for each entry; and of all entries where each goes, which of its tokens there are, [entries, span], and the
    position it has.
    """

    found: list[tuple[Rows, Tensor, Tensor]]
    write_to: Tensor
    present: Tensor
    positions: Tensor


def together(batch: AttentionBatch, block_size: int) -> list[Rows]:
    """The rows of one token, and each prompt."""
    found = []
    if batch.decode is not None:
        tables, positions, places = batch.decode.block_table, batch.decode.positions, batch.decode.slots
        at = torch.arange(len(positions), device=positions.device)
        found.append(Rows(at[:, None], positions[:, None], int(positions.max()) + 1, tables, places))
    for row in spans(batch, block_size):
        number = torch.arange(row.count, device=row.blocks.device)[None]
        place = torch.full((1,), row.slot, device=row.blocks.device)
        found.append(
            Rows(number + row.first, number + row.start, row.start + row.count, row.blocks[None], place),
        )
    return found


def tiles(rows: list[Rows]) -> list[QueryTile]:
    return [
        QueryTile(number, first, each.tile(first, min(PROMPT_TILE, each.at.shape[1] - first)))
        for number, each in enumerate(rows)
        for first in range(0, each.at.shape[1], PROMPT_TILE)
    ]


def line(ring: Tensor, new: Tensor, rows: Rows, window: int | None = None) -> Tensor:
    """What each sequence looks back on in order, [sequences, window - 1 + queries, width]: what its ring holds of the
    tokens before, zeros before the first, and what is `new` of its rows, [tokens, width]. A ring may hold more.
    """
    size = ring.shape[1]
    before = rows.positions[:, :1] + torch.arange(1 - (window or size), 0, device=ring.device)
    kept = ring[rows.places[:, None], before % size].masked_fill_((before < 0)[..., None], 0.0)
    return torch.cat((kept, new[rows.at]), 1)


def remember(ring: Tensor, new: Tensor, rows: Rows) -> None:
    """Put what is new into the rings of the sequences, of each as much as has room."""
    size = ring.shape[1]
    ring[rows.places[:, None], rows.positions[:, -size:] % size] = new[rows.at[:, -size:]]


def room(block_size: int, ratio: int) -> int:
    """Entries that a block has room for."""
    return -(-block_size // ratio)


def _places(tables: Tensor, last: Tensor, ratio: int, block_size: int) -> Tensor:
    """Of the entries that tokens at these positions complete."""
    return tables.gather(1, last // block_size) * room(block_size, ratio) + last % block_size // ratio


def closing(rows: list[Rows], ratio: int, span: int, block_size: int) -> Closing:
    """Entries of `span` tokens each, one for every `ratio` tokens."""
    found, parts = [], []
    for each in rows:
        complete = (each.positions + 1) % ratio == 0
        some = complete.any(1).nonzero()[:, 0]
        if len(some):
            sequence, query = complete[some].nonzero().unbind(1)
            chosen = each.only(some)
            last = chosen.positions[sequence, query][:, None]
            found.append((chosen, sequence, query))
            tokens = last + torch.arange(1 - span, 1, device=last.device)
            write_to = _places(chosen.tables[sequence], last, ratio, block_size)[:, 0]
            parts.append((write_to, tokens >= 0, last[:, 0] - ratio + 1))
    if not parts:
        nothing = rows[0].at.new_empty(0)
        return Closing([], nothing, nothing, nothing)
    return Closing(found, *(torch.cat(part) for part in zip(*parts, strict=True)))


def sources(ring: Tensor, new: Tensor, closed: Closing) -> Tensor:
    """What entries are made from, [entries, span, width], of the rings of as many tokens and of what is new."""
    back = torch.arange(ring.shape[1], device=ring.device)
    return torch.cat(
        [line(ring, new, rows)[sequence[:, None], query[:, None] + back] for rows, sequence, query in closed.found]
    )


def compress(inputs: Tensor, present: Tensor, bias: Tensor) -> Tensor:
    """Entries, [entries, width], each a mean of its tokens' values with the softmax of their gates for weights.

    `inputs` are values and gates, [entries, span, 2 * columns], and `bias`, [ratio, columns], is for the gates of
    `ratio` tokens. Where a span is twice as long, its first half is told by the first half of the columns.
    """
    ratio, columns = bias.shape
    values, gates = inputs.split([columns, columns], -1)
    if inputs.shape[1] > ratio:
        gates = gates.float() + torch.cat((bias, bias))
        values, gates = _overlapped(values, ratio), _overlapped(gates, ratio)
    else:
        gates = gates.float() + bias
    weights = gates.masked_fill(~present[..., None], float("-inf")).softmax(1)
    return (values * weights.to(values.dtype)).sum(1)


def _overlapped(both: Tensor, ratio: int) -> Tensor:
    before, own = both.chunk(2, -1)
    return torch.cat((before[:, :ratio], own[:, ratio:]), 1)


def near(rows: Rows, window: int) -> Tensor:
    """Who may look where in a line of vectors, [sequences, queries, window - 1 + queries]."""
    back = torch.arange(1 - window, rows.at.shape[1], device=rows.at.device)
    keys, queries = (rows.positions[:, :1] + back)[:, None], rows.positions[..., None]
    return (keys >= 0) & (keys <= queries) & (keys > queries - window)


def far(rows: Rows, ratio: int, block_size: int) -> SeenEntries:
    """The entries that were complete before, or are with, each query."""
    last = torch.arange(rows.end // ratio, device=rows.at.device) * ratio + (ratio - 1)
    places = _places(rows.tables, last.expand(len(rows.tables), -1), ratio, block_size)
    return SeenEntries(places, last <= rows.positions[..., None])


def choose(q: Tensor, weights: Tensor, keys: Tensor, seen: SeenEntries, top_k: int) -> SeenEntries:
    """The best `top_k` entries of every query: by the sum over index heads of weight * relu(q . key).

    q is [sequences, queries, heads, width], `weights` [sequences, queries, heads] and `keys` those of all that is seen,
    [sequences, places, width].
    """
    scores = torch.einsum("sqhd,skd->sqhk", q.float(), keys.float()).relu_()
    scores = torch.einsum("sqh,sqhk->sqk", weights, scores).masked_fill_(~seen.allowed, float("-inf"))
    best = scores.topk(min(top_k, scores.shape[-1]), dim=-1).indices
    if q.shape[1] == 1:
        return SeenEntries(seen.places.gather(1, best[:, 0]), seen.allowed.gather(2, best))
    return SeenEntries(seen.places, torch.zeros_like(seen.allowed).scatter_(-1, best, True) & seen.allowed)


def attend(q: Tensor, kept: Tensor, allowed: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """q is [sequences, queries, heads, head_dim]; `kept` are keys and values in one, [sequences, places, head_dim]."""
    scores = (q.flatten(1, 2) @ kept.transpose(1, 2)).float().view(*q.shape[:3], -1) * scale
    scores = scores + additive(allowed, scores.dtype)[:, :, None]
    sunk = sinks.float()[:, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sunk), -1).softmax(-1)[..., :-1]
    return (weights.to(kept.dtype).flatten(1, 2) @ kept).view(q.shape)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last dimensions of each head, whose pairs lie side by side; cos and sin as for `apply_rotary`."""
    width, half = cos.shape[-1], cos.shape[-1] // 2
    still, turned = x.split([x.shape[-1] - width, width], -1)
    first, second = turned.float().unflatten(-1, (half, 2)).unbind(-1)
    cos, sin = cos[..., :half], sin[..., half:]
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((still, pairs.flatten(-2).to(x.dtype)), -1)
