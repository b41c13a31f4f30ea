"""Attention to a window of cached vectors, and to entries that stand for many tokens each.

All that is kept of a token lies at its place in the cache: its vector, what entries are made from, and, at the last
token of an entry, the entry itself. So a prompt may be cut anywhere, and cached blocks carry all that later ones need.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.latent import additive, spans
from phalanx.kernels.tiling import PROMPT_TILE


class Rows(NamedTuple):
    """Rows of a step that are computed together: of some sequences, as many of each, one behind the other.

    `tables` are [sequences, blocks], `positions` [sequences, queries], all below `end`.
    """

    span: slice
    tables: Tensor
    positions: Tensor
    end: int

    def of(self, x: Tensor) -> Tensor:
        """This part of what there is for every row, [sequences, queries, ...]."""
        return x[self.span].unflatten(0, self.positions.shape)


class Seen(NamedTuple):
    """Places in the flattened cache, [sequences, places], and who may look there, [sequences, queries, places]."""

    places: Tensor
    allowed: Tensor

    def and_also(self, others: Seen) -> Seen:
        return Seen(*(torch.cat(pair, -1) for pair in zip(self, others, strict=True)))


class Closing(NamedTuple):
    """Entries that tokens of a step complete: where each goes, the places of its tokens, [entries, span], which of
    these tokens there are, and the position it has.
    """

    write_to: Tensor
    sources: Tensor
    present: Tensor
    positions: Tensor


def cut(batch: AttentionBatch, block_size: int) -> list[Rows]:
    """The rows of one token together, and prompts by tiles."""
    found = []
    if batch.decode is not None:
        tables, positions = batch.decode.block_table, batch.decode.positions
        found.append(Rows(slice(0, len(positions)), tables, positions[:, None], int(positions.max()) + 1))
    for row in spans(batch, block_size):
        for offset in range(0, row.count, PROMPT_TILE):
            count, start = min(PROMPT_TILE, row.count - offset), row.start + offset
            positions = torch.arange(start, start + count, device=row.blocks.device)[None]
            span = slice(row.first + offset, row.first + offset + count)
            found.append(Rows(span, row.blocks[None], positions, start + count))
    return found


def _places(tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    return tables.gather(1, positions // block_size) * block_size + positions % block_size


def closing(cuts: list[Rows], write_to: Tensor, ratio: int, span: int, block_size: int) -> Closing:
    """Entries of `span` tokens each, one for every `ratio` tokens."""
    back = torch.arange(1 - span, 1, device=write_to.device)
    parts = []
    for rows in cuts:
        sequence, query = ((rows.positions + 1) % ratio == 0).nonzero().unbind(1)
        tokens = rows.positions[sequence, query][:, None] + back
        sources = _places(rows.tables[sequence], tokens.clamp_min(0), block_size)
        parts.append((rows.of(write_to)[sequence, query], sources, tokens >= 0, tokens[:, -1] - ratio + 1))
    return Closing(*(torch.cat(part) for part in zip(*parts, strict=True)))


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


def near(rows: Rows, window: int, block_size: int) -> Seen:
    """The vectors of the last `window` tokens."""
    back = torch.arange(2 - window - rows.positions.shape[1], 1, device=rows.positions.device)
    keys, queries = rows.positions[:, -1:] + back, rows.positions[..., None]
    allowed = (keys[:, None] >= 0) & (keys[:, None] <= queries) & (keys[:, None] > queries - window)
    return Seen(_places(rows.tables, keys.clamp_min(0), block_size), allowed)


def far(rows: Rows, ratio: int, block_size: int) -> Seen:
    """The entries that were complete before, or are with, each query."""
    last = torch.arange(rows.end // ratio, device=rows.positions.device) * ratio + (ratio - 1)
    places = _places(rows.tables, last.expand(len(rows.tables), -1), block_size)
    return Seen(places, last <= rows.positions[..., None])


def choose(q: Tensor, weights: Tensor, keys: Tensor, seen: Seen, top_k: int) -> Seen:
    """The best `top_k` entries of every query: by the sum over index heads of weight * relu(q . key).

    q is [sequences, queries, heads, width], `weights` [sequences, queries, heads] and `keys` those of all that is seen,
    [sequences, places, width].
    """
    scores = torch.einsum("sqhd,skd->sqhk", q.float(), keys.float()).relu_()
    scores = torch.einsum("sqh,sqhk->sqk", weights, scores).masked_fill_(~seen.allowed, float("-inf"))
    best = scores.topk(min(top_k, scores.shape[-1]), dim=-1).indices
    if q.shape[1] == 1:
        return Seen(seen.places.gather(1, best[:, 0]), seen.allowed.gather(2, best))
    return Seen(seen.places, torch.zeros_like(seen.allowed).scatter_(-1, best, True) & seen.allowed)


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
