"""Attention over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DecodeRows:
    """Sequences that compute one token: they come first in the batch and run as one padded product."""

    block_table: Tensor
    positions: Tensor


@dataclass(frozen=True)
class PrefillRow:
    """A sequence that computes several tokens: `count` rows of the batch from `first` on, from position `start` on."""

    first: int
    count: int
    start: int
    blocks: Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """How the rows of a step meet the cache. `write_to` is each token's place in the flattened cache."""

    write_to: Tensor
    decode: DecodeRows | None
    prefills: list[PrefillRow]


class Masks:
    """The masks of one step, made once for each window and shared by all layers that have it."""

    def __init__(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> None:
        self._batch = batch
        self._block_size = block_size
        self._dtype = dtype
        self._decode: dict[int | None, Tensor] = {}
        self._prefill: dict[tuple[int, int | None], Tensor | None] = {}

    def decode(self, window: int | None) -> Tensor:
        if window not in self._decode:
            rows = self._batch.decode
            assert rows is not None
            length = rows.block_table.shape[1] * self._block_size
            keys = torch.arange(length, device=rows.positions.device)
            self._decode[window] = self._additive(visible(rows.positions[:, None], keys, window))[:, None, None]
        return self._decode[window]

    def prefill(self, row: PrefillRow, window: int | None) -> Tensor | None:
        """None where plain causal attention from position 0 is meant."""
        if row.start == 0 and (window is None or row.count <= window):
            return None
        key = (row.first, window)
        if key not in self._prefill:
            positions = torch.arange(row.start + row.count, device=row.blocks.device)
            self._prefill[key] = self._additive(visible(positions[row.start :, None], positions, window))
        return self._prefill[key]

    def _additive(self, allowed: Tensor) -> Tensor:
        zeros = torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device)
        return zeros.masked_fill_(~allowed, float("-inf"))


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions a query position may look at: itself and those before it, at most `window` of them."""
    allowed = keys <= queries
    return allowed if window is None else allowed & (keys > queries - window)


def paged_attention(
    q: Tensor, kv: Tensor, cache: Tensor, batch: AttentionBatch, masks: Masks, window: int | None, scale: float
) -> Tensor:
    """Write the new keys and values, then attend.

    q is [tokens, heads, head_dim], kv [tokens, 2, kv_heads, head_dim] and the cache
    [blocks, block_size, 2, kv_heads, head_dim].
    All writes come before any read, so a sequence may use a prefix that another one computes in the same step.
    """
    cache.flatten(0, 1).index_copy_(0, batch.write_to, kv)
    out = torch.empty_like(q)
    if batch.decode is not None:
        rows = batch.decode.positions.shape[0]
        out[:rows] = _decode(q[:rows], cache, batch.decode, masks.decode(window), scale)
    for row in batch.prefills:
        span = slice(row.first, row.first + row.count)
        mask = masks.prefill(row, window)
        seen = kv[span] if mask is None else _gather(cache, row)
        out[span] = _prefill(q[span], seen, mask, scale)
    return out


def _decode(q: Tensor, cache: Tensor, rows: DecodeRows, mask: Tensor, scale: float) -> Tensor:
    """The query heads of a group stand where a longer query would: one product a KV head."""
    count, heads, head_dim = q.shape
    kv = cache.index_select(0, rows.block_table.flatten()).view(count, -1, *cache.shape[2:])
    k, v = kv.unbind(2)
    grouped = q.view(count, k.shape[2], -1, head_dim)
    attended = F.scaled_dot_product_attention(
        grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return attended.reshape(count, heads, head_dim)


def _gather(cache: Tensor, row: PrefillRow) -> Tensor:
    return cache.index_select(0, row.blocks).flatten(0, 1)[: row.start + row.count]


def _prefill(q: Tensor, kv: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    k, v = (part.transpose(0, 1)[None] for part in kv.unbind(1))
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)
