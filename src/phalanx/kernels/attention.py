"""Attention over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.cache import take

PROMPT_TILE = 128
"""Rows of one prompt that a GPU takes at once."""

SPLIT_TARGET = 264
"""Programs that fill a large GPU: decode attention is split over the sequence until there are about this many."""

MOST_SPLITS = 16

READERS = 147
"""Programs that, each at its own speed, read as fast as memory does. From an H200, as is the next one."""

PART_TOKENS = 0.75
"""What a further program costs all of them, in tokens that one reads meanwhile."""


def splits_of(rows: int, kv_heads: int, uneven: bool = False) -> int:
    """The parts of every sequence, each a program for every KV head."""
    wanted = MOST_SPLITS if uneven else max(1, min(MOST_SPLITS, SPLIT_TARGET // (rows * kv_heads)))
    return int(1 << (wanted - 1).bit_length())


def is_uneven(lengths: Sequence[int], kv_heads: int) -> bool:
    """Whether the GPU would wait for the longest of these sequences, and longer than further parts of all take it."""
    rows = len(lengths)
    longest_part = max(lengths) / splits_of(rows, kv_heads)
    together = kv_heads * (sum(lengths) / READERS + rows * MOST_SPLITS * PART_TOKENS)
    return longest_part > 2 * together


@dataclass(frozen=True)
class DecodeRows:
    """Sequences that compute one token: they come first in the batch and run as one padded product.

    `uneven` says that some are much longer than the others, which is known where they are planned.
    """

    block_table: Tensor
    positions: Tensor
    uneven: bool = False


@dataclass(frozen=True)
class PrefillRow:
    """A sequence that computes several tokens: `count` rows of the batch from `first` on, from position `start` on."""

    first: int
    count: int
    start: int
    blocks: Tensor


@dataclass(frozen=True)
class PrefillTiles:
    """The same sequences for a GPU, cut into tiles of rows.

    A tile is its row of `tables`, its first row, its rows, its first position, and where this step began its sequence.
    `resumed` says whether any sequence has tokens from before this step.
    """

    tables: Tensor
    tiles: Tensor
    resumed: bool


def tile_prompt(sequence: int, first: int, count: int, start: int) -> list[tuple[int, int, int, int, int]]:
    """The tiles of one sequence, the longest look-back first."""
    offsets = reversed(range(0, count, PROMPT_TILE))
    return [(sequence, first + at, min(PROMPT_TILE, count - at), start + at, start) for at in offsets]


@dataclass(frozen=True)
class AttentionBatch:
    """How the rows of a step meet the cache. `write_to` is each token's place in the flattened cache."""

    write_to: Tensor
    decode: DecodeRows | None
    prefills: list[PrefillRow]
    tiles: PrefillTiles | None = None


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
    qkv: Tensor,
    heads: int,
    cache: Tensor,
    batch: AttentionBatch,
    masks: Masks,
    window: int | None,
    scale: float,
    value_scale: float = 1.0,
) -> Tensor:
    """Attend with the query heads of qkv, [tokens, heads + 2 * kv_heads, head_dim], whose keys and values are cached.

    All writes to the cache come before any read, so a sequence may use a prefix that another one computes in the same
    step. `scale` is for the scores and `value_scale` for what is attended; an FP8 cache's own scales are in them.
    """
    out = qkv.new_empty(qkv.shape[0], heads, qkv.shape[2])
    if batch.decode is not None:
        rows = batch.decode.positions.shape[0]
        decode_attention(qkv[:rows, :heads], cache, batch.decode, masks, window, scale, out[:rows], value_scale)
    if batch.tiles is not None:
        prefill_attention(qkv, heads, cache, batch.tiles, window, scale, out, value_scale)
    for row in batch.prefills:
        span = slice(row.first, row.first + row.count)
        mask = masks.prefill(row, window)
        fresh = mask is None and cache.dtype is qkv.dtype
        kv = qkv[span, heads:].unflatten(1, (2, -1)) if fresh else _gather(cache, row, qkv.dtype)
        torch.mul(_prefill(qkv[span, :heads], kv, mask, scale), value_scale, out=out[span])
    return out


def decode_attention(
    q: Tensor,
    cache: Tensor,
    rows: DecodeRows,
    masks: Masks,
    window: int | None,
    scale: float,
    out: Tensor,
    value_scale: float = 1.0,
) -> None:
    """One new token a sequence, [rows, heads, head_dim], against all of its cached keys and values, into `out`."""
    count, heads, head_dim = q.shape
    if q.is_cuda:
        from phalanx.kernels import gpu

        gpu.decode_attention(q, cache, rows, window, scale, out, value_scale)
    elif cpu.runs(cache):
        block_size, kv_heads = cache.shape[1], cache.shape[3]
        table, sizes = rows.block_table.contiguous(), (block_size, heads, kv_heads, head_dim)
        cpu.call(
            "decode_attention",
            *(q, cache, table, rows.positions, out),
            *(count, q.stride(0), table.shape[1], *sizes, window or 0, scale),
        )
    else:
        out.copy_(decode_attention_torch(q, cache, rows, masks.decode(window), scale, value_scale))


def decode_attention_torch(
    q: Tensor, cache: Tensor, rows: DecodeRows, mask: Tensor, scale: float, value_scale: float = 1.0
) -> Tensor:
    """The definition. The query heads of a group stand where a longer query would: one product a KV head."""
    count, heads, head_dim = q.shape
    kv = take(cache, rows.block_table.flatten(), q.dtype).view(count, -1, *cache.shape[2:])
    k, v = (part.transpose(1, 2) for part in kv.unbind(2))
    grouped = q.reshape(count, k.shape[1], -1, head_dim)
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return attended.reshape(count, heads, head_dim) * value_scale


def prefill_attention(
    qkv: Tensor,
    heads: int,
    cache: Tensor,
    cut: PrefillTiles,
    window: int | None,
    scale: float,
    out: Tensor,
    value_scale: float = 1.0,
) -> None:
    """Tiles of prompts against what is cached of their sequences, into their rows of `out`."""
    if qkv.is_cuda:
        from phalanx.kernels import gpu

        gpu.prefill_attention(qkv, heads, cache, cut, window, scale, out, value_scale)
    else:
        prefill_attention_torch(qkv[:, :heads], cache, cut, window, scale, out, value_scale)


def prefill_attention_torch(
    q: Tensor,
    cache: Tensor,
    cut: PrefillTiles,
    window: int | None,
    scale: float,
    out: Tensor,
    value_scale: float = 1.0,
) -> None:
    """The definition: each row looks at its sequence up to its own position. A tile of no rows is nothing."""
    for sequence, first, count, start, _ in cut.tiles.tolist():
        if count:
            row = PrefillRow(first, count, start, cut.tables[sequence, : -(-(start + count) // cache.shape[1])])
            positions = torch.arange(start + count, device=q.device)
            mask, kv = visible(positions[start:, None], positions, window), _gather(cache, row, q.dtype)
            out[first : first + count] = _prefill(q[first : first + count], kv, mask, scale) * value_scale


def _gather(cache: Tensor, row: PrefillRow, dtype: torch.dtype) -> Tensor:
    return take(cache, row.blocks, dtype).flatten(0, 1)[: row.start + row.count]


def _prefill(q: Tensor, kv: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    k, v = (part.transpose(0, 1)[None] for part in kv.unbind(1))
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)
