"""Which of its cached tokens a row looks at, where an indexer chooses them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, visible
from phalanx.kernels.spans import additive, spans
from phalanx.kernels.tiling import PROMPT_TILE, DecodeRows

MOST_SCORES = 1 << 26
"""Scores of an indexer that a GPU holds at once."""


class Chosen(NamedTuple):
    """The positions an indexer lets each row look at, as masks to be added to scores: of the rows of one token
    together, [rows, positions], and of each prompt, [its tokens, positions].
    """

    decode: Tensor | None
    prompts: list[Tensor]


class Best(NamedTuple):
    """The same for a GPU: every token a row of its own, and its best positions, [tokens, top_k], the best first."""

    rows: DecodeRows
    positions: Tensor


def choose(
    q: Tensor, weights: Tensor, keys: Tensor, batch: AttentionBatch, top_k: int, dtype: torch.dtype
) -> Chosen | Best | None:
    """The best `top_k` positions of every row: by the sum over index heads of weight * relu(q . key).

    q is [tokens, index_heads, head_dim], `weights` [tokens, index_heads] and the cached `keys` [blocks, block_size,
    head_dim]. None: there are no more than that.
    """
    if q.is_cuda:
        return choose_gpu(q, weights, keys, rows_of(batch, len(q)), top_k)
    return choose_torch(q, weights, keys, batch, top_k, dtype)


def rows_of(batch: AttentionBatch, tokens: int) -> DecodeRows:
    """All tokens of a step as rows of one token each, laid out on the device.

    Where there is room for more rows of one token than there are, tiles say what the others are.
    """
    decode, cut = batch.decode, batch.tiles
    if cut is None:
        assert decode is not None
        return decode
    sequence, first, count, start, _ = cut.tiles.long()[:, :, None].unbind(1)
    within = torch.arange(PROMPT_TILE, device=sequence.device)
    row = torch.where(within < count, first + within, tokens).flatten()
    slots, positions = sequence.new_zeros(2, tokens + 1).unbind()
    if decode is not None:
        slots[: len(decode.slots)] = decode.slots
        positions[: len(decode.slots)] = decode.positions
    slots.scatter_(0, row, sequence.expand(-1, PROMPT_TILE).flatten())
    positions.scatter_(0, row, (start + within).flatten())
    return DecodeRows(cut.tables, slots[:tokens], positions[:tokens])


def choose_gpu(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    rows: DecodeRows,
    top_k: int,
    ratio: int = 1,
    block_size: int | None = None,
) -> Best | None:
    """With a `ratio`, the best of the entries that stand for so many tokens each, of which a block has `block_size`."""
    from phalanx.kernels.gpu.indexer import index_scores

    blocks = rows.tables.shape[1] if rows.blocks is None else rows.blocks
    width = blocks * (block_size or keys.shape[1]) // ratio
    if width <= top_k:
        return None
    found = torch.empty(len(q), top_k, dtype=torch.int64, device=q.device)
    at_once = max(1, MOST_SCORES // width)
    for first in range(0, len(q), at_once):
        span = slice(first, first + at_once)
        where = rows.tables, rows.slots[span], rows.positions[span]
        scores = index_scores(q[span], weights[span], keys, *where, width, ratio, block_size)
        found[span] = scores.topk(top_k, dim=-1).indices
    return Best(rows, found)


def choose_torch(
    q: Tensor, weights: Tensor, keys: Tensor, batch: AttentionBatch, top_k: int, dtype: torch.dtype
) -> Chosen:
    """The definition."""
    decode: Tensor | None = None
    if batch.decode is not None:
        table, positions = batch.decode.block_table, batch.decode.positions
        rows = len(positions)
        kept = keys[table.flatten()].view(rows, -1, keys.shape[-1])
        scores = torch.einsum("thd,tsd->ths", q[:rows].float(), kept.float()).relu_()
        allowed = visible(positions[:, None], torch.arange(kept.shape[1], device=q.device), None)
        decode = _best(torch.einsum("th,ths->ts", weights[:rows], scores), allowed, top_k, dtype)
    prompts = []
    for row in spans(batch, keys.shape[1]):
        span = slice(row.first, row.first + row.count)
        kept = keys[row.blocks].flatten(0, 1)[: row.start + row.count]
        scores = torch.einsum("thd,sd->ths", q[span].float(), kept.float()).relu_()
        positions = torch.arange(len(kept), device=q.device)
        allowed = visible(positions[row.start :, None], positions, None)
        prompts.append(_best(torch.einsum("th,ths->ts", weights[span], scores), allowed, top_k, dtype))
    return Chosen(decode, prompts)


def _best(scores: Tensor, allowed: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    scores = scores.masked_fill(~allowed, float("-inf"))
    best = scores.topk(min(top_k, scores.shape[-1]), dim=-1).indices
    return additive(torch.zeros_like(allowed).scatter_(-1, best, True) & allowed, dtype)
