"""Attention over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.cache import Fresh, take
from phalanx.kernels.fp8 import GROUP, Quantised
from phalanx.kernels.quantise import quantise
from phalanx.kernels.tiling import DecodeRows, PrefillTiles

FEW_KEYS = 512
"""Of a prompt. Up to so many, a CPU's own kernel attends from its tokens, each by itself, more quickly than torch's."""


@dataclass(frozen=True)
class PrefillRow:
    """A sequence that computes several tokens: `count` rows of the batch from `first` on, from position `start` on.

    `slot` is the place of its state.
    """

    first: int
    count: int
    start: int
    blocks: Tensor
    slot: int = 0


@dataclass(frozen=True)
class AttentionBatch:
    """How the rows of a step meet the cache. `write_to` is each token's place in the flattened cache.

    A GPU attends by `tiles`, where prompts have them, and not by `prefills`. A CPU's own kernels take all tokens of
    short prompts as rows of one, `each`. `windows` are the same rows for groups of layers with blocks of their own.
    """

    write_to: Tensor
    decode: DecodeRows | None
    prefills: list[PrefillRow]
    tiles: PrefillTiles | None = None
    each: DecodeRows | None = None
    windows: tuple[AttentionBatch, ...] = ()

    @property
    def alone(self) -> DecodeRows | None:
        """All tokens as rows of one, where they may be taken so."""
        return self.each if self.prefills or self.tiles is not None else self.decode

    def of(self, group: int) -> AttentionBatch:
        return self.windows[group - 1] if group else self


class Sight(NamedTuple):
    """What a layer's queries may look at: all positions up to their own, the last `window`, or, where `chunked`, those
    of their own chunk of `window` positions. `sinks` are scores, one a query head, that take part in the softmax alone.
    """

    window: int | None = None
    chunked: bool = False
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the GPU has a kernel for it."""
        return not self.chunked


class SightMasks:
    """The masks of one step, made once for each kind of sight and shared by all layers that have it."""

    def __init__(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> None:
        self._batch = batch
        self._block_size = block_size
        self._dtype = dtype
        self._decode: dict[tuple[int | None, bool], Tensor] = {}
        self._prefill: dict[tuple[int, int | None, bool], Tensor | None] = {}

    def decode(self, sight: Sight) -> Tensor:
        key = (sight.window, sight.chunked)
        if key not in self._decode:
            rows = self._batch.decode
            assert rows is not None
            length = rows.block_table.shape[1] * self._block_size
            keys = torch.arange(length, device=rows.positions.device)
            self._decode[key] = self._additive(visible(rows.positions[:, None], keys, *key))[:, None, None]
        return self._decode[key]

    def prefill(self, row: PrefillRow, sight: Sight) -> Tensor | None:
        """None where plain causal attention from position 0 is meant."""
        if row.start == 0 and (sight.window is None or row.count <= sight.window):
            return None
        key = (row.first, sight.window, sight.chunked)
        if key not in self._prefill:
            positions = torch.arange(row.start + row.count, device=row.blocks.device)
            self._prefill[key] = self._additive(visible(positions[row.start :, None], positions, *key[1:]))
        return self._prefill[key]

    def _additive(self, allowed: Tensor) -> Tensor:
        zeros = torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device)
        return zeros.masked_fill_(~allowed, float("-inf"))


def visible(queries: Tensor, keys: Tensor, window: int | None, chunked: bool = False) -> Tensor:
    """Which key positions a query position may look at: itself and those before it, at most `window` of them."""
    allowed = keys <= queries
    if window is None:
        return allowed
    return allowed & (keys // window == queries // window if chunked else keys > queries - window)


def takes_fresh(batch: AttentionBatch, cache: Tensor, sight: Sight, dtype: torch.dtype) -> bool:
    """Whether attention had better be given heads as they were computed. Of several rows one may look at another."""
    alone = batch.decode is not None and batch.tiles is None and not batch.prefills and len(batch.write_to) == 1
    return alone and sight.is_plain and _reads_early(cache, dtype)


def _reads_early(cache: Tensor, dtype: torch.dtype) -> bool:
    if not cache.is_cuda:
        return False
    from phalanx.kernels.gpu.attention_early import takes

    return takes(dtype, cache.shape[-1])


def paged_attention(
    qkv: Tensor,
    heads: int,
    cache: Tensor,
    batch: AttentionBatch,
    masks: SightMasks,
    sight: Sight,
    scale: float,
    value_scale: float = 1.0,
    fresh: Fresh | None = None,
) -> Tensor:
    """Attend with the query heads of qkv, [tokens, heads + 2 * kv_heads, head_dim], whose keys and values are cached,
    or which are all as they were computed, with `fresh`.

    All writes to the cache come before any read, so a sequence may use a prefix that another one computes in the same
    step. `scale` is for the scores and `value_scale` for what is attended; an FP8 cache's own scales are in them.
    """
    out = qkv.new_empty(qkv.shape[0], heads, qkv.shape[2])
    if fresh is not None:
        _attend_fresh(qkv, heads, cache, batch, sight, scale, out, value_scale, fresh)
        return out
    if batch.alone is not None and cpu.runs(cache):
        decode_attention(qkv[:, :heads], cache, batch.alone, masks, sight, scale, out, value_scale)
        return out
    if batch.decode is not None:
        rows = batch.decode.positions.shape[0]
        decode_attention(qkv[:rows, :heads], cache, batch.decode, masks, sight, scale, out[:rows], value_scale)
    if batch.tiles is not None:
        prefill_attention(qkv, heads, cache, batch.tiles, sight, scale, out, value_scale)
        return out
    for row in batch.prefills:
        span, mask = slice(row.first, row.first + row.count), masks.prefill(row, sight)
        whole = mask is None and cache.dtype is qkv.dtype
        kv = qkv[span, heads:].unflatten(1, (2, -1)) if whole else _gather(cache, row, qkv.dtype)
        torch.mul(_prefill(qkv[span, :heads], kv, mask, scale, sight.sinks), value_scale, out=out[span])
    return out


def paged_attention_quantised(
    qkv: Tensor,
    heads: int,
    cache: Tensor,
    batch: AttentionBatch,
    masks: SightMasks,
    sight: Sight,
    scale: float,
    value_scale: float = 1.0,
    fresh: Fresh | None = None,
) -> Quantised:
    """The same with the heads of a token side by side, brought to FP8 on the way out."""
    by_kernels = qkv.is_cuda and sight.is_plain and (batch.tiles is not None or not batch.prefills)
    if not by_kernels or qkv.shape[2] != GROUP:
        attended = paged_attention(qkv, heads, cache, batch, masks, sight, scale, value_scale, fresh)
        return quantise(attended.flatten(1))
    from phalanx.kernels.gpu import attention as gpu
    from phalanx.kernels.gpu.rows import empty_quantised

    out, window, sinks = empty_quantised(len(qkv), heads * GROUP, qkv.device), sight.window, sight.sinks
    if fresh is not None:
        _attend_fresh(qkv, heads, cache, batch, sight, scale, out, value_scale, fresh)
        return out
    if batch.decode is not None:
        rows = len(batch.decode.positions)
        first = Quantised(out.values[:rows], out.scales[:rows])
        gpu.decode_attention(qkv[:rows, :heads], cache, batch.decode, window, scale, first, value_scale, sinks)
    if batch.tiles is not None:
        gpu.prefill_attention(qkv, heads, cache, batch.tiles, window, scale, out, value_scale, sinks)
    return out


def _attend_fresh(
    qkv: Tensor,
    heads: int,
    cache: Tensor,
    batch: AttentionBatch,
    sight: Sight,
    scale: float,
    out: Tensor | Quantised,
    value_scale: float,
    fresh: Fresh,
) -> None:
    from phalanx.kernels.gpu.attention_early import decode_early

    assert batch.decode is not None
    decode_early(qkv, heads, cache, batch.decode, sight.window, scale, out, value_scale, sight.sinks, fresh)


def decode_attention(
    q: Tensor,
    cache: Tensor,
    rows: DecodeRows,
    masks: SightMasks,
    sight: Sight,
    scale: float,
    out: Tensor,
    value_scale: float = 1.0,
) -> None:
    """One new token a sequence, [rows, heads, head_dim], against all of its cached keys and values, into `out`."""
    if q.is_cuda and sight.is_plain:
        from phalanx.kernels.gpu import attention as gpu

        gpu.decode_attention(q, cache, rows, sight.window, scale, out, value_scale, sight.sinks)
    elif cpu.runs(cache):
        assert rows.tables.dtype is torch.int32
        count, heads, head_dim = q.shape
        sizes = (count, q.stride(0), rows.tables.stride(0), cache.shape[1], heads, cache.shape[3], head_dim)
        cpu.call(
            "decode_attention",
            *(q, cache, rows.slots, rows.tables, rows.positions, out, *sizes),
            *(sight.window or 0, int(sight.chunked), sight.sinks, scale),
        )
    else:
        out.copy_(decode_attention_torch(q, cache, rows, masks.decode(sight), scale, value_scale, sight.sinks))


def decode_attention_torch(
    q: Tensor,
    cache: Tensor,
    rows: DecodeRows,
    mask: Tensor,
    scale: float,
    value_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition. The query heads of a group stand where a longer query would: one product a KV head."""
    count, heads, head_dim = q.shape
    kv = take(cache, rows.block_table.flatten(), q.dtype).view(count, -1, *cache.shape[2:])
    k, v = (part.transpose(1, 2) for part in kv.unbind(2))
    grouped = q.reshape(count, k.shape[1], -1, head_dim)
    attended = _attend(grouped, k, v, mask, scale, None if sinks is None else sinks.view(k.shape[1], -1))
    return attended.reshape(count, heads, head_dim) * value_scale


def prefill_attention(
    qkv: Tensor,
    heads: int,
    cache: Tensor,
    cut: PrefillTiles,
    sight: Sight,
    scale: float,
    out: Tensor,
    value_scale: float = 1.0,
) -> None:
    """Tiles of prompts against what is cached of their sequences, into their rows of `out`."""
    if qkv.is_cuda and sight.is_plain:
        from phalanx.kernels.gpu import attention as gpu

        gpu.prefill_attention(qkv, heads, cache, cut, sight.window, scale, out, value_scale, sight.sinks)
    else:
        prefill_attention_torch(qkv[:, :heads], cache, cut, sight, scale, out, value_scale)


def prefill_attention_torch(
    q: Tensor,
    cache: Tensor,
    cut: PrefillTiles,
    sight: Sight,
    scale: float,
    out: Tensor,
    value_scale: float = 1.0,
) -> None:
    """The definition: each row looks at its sequence up to its own position. A tile of no rows is nothing."""
    for sequence, first, count, start, _ in cut.tiles.tolist():
        if count:
            row = PrefillRow(first, count, start, cut.tables[sequence, : -(-(start + count) // cache.shape[1])].long())
            positions = torch.arange(start + count, device=q.device)
            allowed = visible(positions[start:, None], positions, sight.window, sight.chunked)
            mask = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill_(~allowed, float("-inf"))
            kv = _gather(cache, row, q.dtype)
            out[first : first + count] = _prefill(q[first : first + count], kv, mask, scale, sight.sinks) * value_scale


def _gather(cache: Tensor, row: PrefillRow, dtype: torch.dtype) -> Tensor:
    return take(cache, row.blocks, dtype).flatten(0, 1)[: row.start + row.count]


def _prefill(q: Tensor, kv: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None) -> Tensor:
    k, v = (part.transpose(0, 1)[None] for part in kv.unbind(1))
    if sinks is None:
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)
    count, group = q.shape[0], q.shape[1] // k.shape[1]
    if mask is None:
        mask = torch.full((count, count), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    grouped = q.transpose(0, 1).reshape(1, k.shape[1], group * count, -1)
    by_row = sinks.repeat_interleave(count).view(k.shape[1], -1)
    attended = _attend(grouped, k, v, mask.repeat(group, 1), scale, by_row)
    return attended.reshape(q.shape[1], count, -1).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Softmax attention with one KV head for all rows of q, [sequences, kv_heads, rows, head_dim]; `sinks` by row."""
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float() * scale + mask
    sunk = sinks.float()[None, :, :, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sunk), -1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v
