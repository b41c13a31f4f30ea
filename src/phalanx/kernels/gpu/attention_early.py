"""Attention of a single row, which reads keys and values before the kernel ahead has ended.

That one makes the row's own heads: they are turned and cached here, which takes a launch less. A program's numbers are
dealt to many warps: what is left to do behind the kernel ahead is one long chain of instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.cache import Fresh
from phalanx.kernels.fp8 import LARGEST, Quantised
from phalanx.kernels.gpu.attention import attend_tile, join_splits, places_of, store_stretch, to_meet
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.rows import as_cached
from phalanx.kernels.tiling import DecodeRows, splits_of

ASIDE = 16
"""Tokens before a row's own that kernels not yet ended may still write: more than are drafted in a step."""

MOST_DIMENSIONS = 128
"""Of a head. Longer ones were not measured."""

TOKENS, STAGES = 64, 2
"""That a program takes at once, and how many times so many it has room for."""

SHORT_DIMENSIONS, SHORT_WARPS, WARPS = 64, 8, 16
"""Of a program, for heads of up to so many dimensions, and of more."""

_ASIDE = tl.constexpr(ASIDE)
_ANYWHERE = ["slots", "positions", "write_to", "cos", "sin"]


@triton.jit
def _turned(heads, cos, sin, d, mask, ROTARY: tl.constexpr):
    """Heads of a token. `heads` points at their first numbers."""
    other = tl.where(d < ROTARY, (d + ROTARY // 2) % ROTARY, d)
    straight, across = tl.load(heads + d, mask=mask, other=0.0), tl.load(heads + other, mask=mask, other=0.0)
    near = tl.load(cos + d, mask=d < ROTARY, other=1.0).to(tl.float32)
    far = tl.load(sin + d, mask=d < ROTARY, other=0.0).to(tl.float32)
    return (straight.to(tl.float32) * near + across.to(tl.float32) * far).to(straight.dtype)


@triton.jit
def _stretch(last, window, split, SPLITS: tl.constexpr, TOKENS: tl.constexpr):
    """Where a program begins, and where it stops: before the row's own token."""
    first = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    share = tl.cdiv(tl.cdiv(last + 1 - first, TOKENS), SPLITS) * TOKENS
    start = first + split * share
    return start, tl.minimum(start + share, last)


@triton.jit
def _places(
    table, cache, at, stop, kv, d, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Which tokens there are from a position on, and where their keys and values begin."""
    position = at + tl.arange(0, TOKENS)
    seen = position < stop
    page = tl.load(table + position // PAGE, mask=seen, other=0).to(tl.int64)
    entry = (page * PAGE + position % PAGE) * 2 * KV_HEADS + kv
    keys = cache + entry[None, :] * HEAD_DIM + d[:, None]
    return position, seen, keys, cache + (entry + KV_HEADS)[:, None] * HEAD_DIM + d[None, :]


@triton.jit
def _read(key_places, value_places, known, inside, keys, values):
    """Of the tokens that are known; of others what is given. Past the first cache, where what lies beside a token that
    is read early would stay as it was.
    """
    keys = tl.load(key_places, mask=known[None, :] & inside[:, None], other=keys, cache_modifier=".cg")
    values = tl.load(value_places, mask=known[:, None] & inside[None, :], other=values, cache_modifier=".cg")
    return keys, values


@triton.jit(do_not_specialize=["out_rows", "table_rows"], do_not_specialize_on_alignment=_ANYWHERE)
def _decode_early(
    qkv, cache, tables, slots, positions, cos, sin, write_to, sinks, out, out_scales, partial, peaks, totals, stride,
    table_rows, table_width, window, scale, value_scale, out_rows, key_inverse, value_inverse, SINKS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, ROTARY: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """As `_decode`, but for the row's own token, which the last stretch begins with.

    Slots and positions are read before the kernel ahead has ended, and the first tile of what was cached well before
    the position. If then they turn out to be others, which is so only where this step computes them, all begins anew.
    """
    let_next_start()
    kv, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    g, d = tl.arange(0, GROUP), tl.arange(0, DIM)
    known, inside = g < group, d < HEAD_DIM
    slot, last = tl.load(slots + row), tl.load(positions + row)
    table = tables + tl.minimum(tl.maximum(slot, 0), table_rows - 1) * table_width
    guess = tl.minimum(tl.maximum(last, 0), table_width * PAGE - 1)
    start, stop = _stretch(guess, window, split, SPLITS, TOKENS)
    position, seen, key_places, value_places = _places(
        table, cache, start, stop, kv, d, KV_HEADS, HEAD_DIM, PAGE, TOKENS
    )  # fmt: skip
    settled = position < guess - _ASIDE
    keys, values = _read(key_places, value_places, seen & settled, inside, 0.0, 0.0)
    wait_for_ahead()
    slot_now, last_now = tl.load(slots + row, volatile=True), tl.load(positions + row, volatile=True)
    keys, values = _read(key_places, value_places, seen & ~settled, inside, keys, values)
    own, head, across = qkv + row * stride, kv * group + g, d[None, :]
    cos += row * ROTARY
    sin += row * ROTARY
    asked = known[:, None] & inside[None, :]
    queries = _turned(own + head[:, None] * HEAD_DIM, cos, sin, across, asked, ROTARY)
    queries = to_meet(queries, cache)
    if (slot_now != slot) | (last_now != last):
        table = tables + slot_now * table_width
        start, stop = _stretch(last_now, window, split, SPLITS, TOKENS)
        position, seen, key_places, value_places = _places(
            table, cache, start, stop, kv, d, KV_HEADS, HEAD_DIM, PAGE, TOKENS
        )  # fmt: skip
        keys, values = _read(key_places, value_places, seen, inside, 0.0, 0.0)
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    if SINKS and split == 0:
        peak = tl.load(sinks + head, mask=known, other=0.0).to(tl.float32)
        total += 1.0
    acc = tl.zeros([GROUP, DIM], tl.float32)
    if split == SPLITS - 1:
        key_head = own + (HEADS + kv + tl.arange(0, 1))[:, None] * HEAD_DIM
        value = tl.load(key_head + KV_HEADS * HEAD_DIM + across, mask=inside[None, :], other=0.0)
        key = _turned(key_head, cos, sin, across, inside[None, :], ROTARY)
        key, value = as_cached(key, key_inverse, cache, LARGEST), as_cached(value, value_inverse, cache, LARGEST)
        place = cache + (tl.load(write_to + row) * 2 * KV_HEADS + kv) * HEAD_DIM + across
        tl.store(place, key, mask=inside[None, :])
        tl.store(place + KV_HEADS * HEAD_DIM, value, mask=inside[None, :])
        score = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * scale
        top = tl.maximum(peak, score)
        weight = tl.exp(score - top)
        total = total * tl.exp(peak - top) + weight
        acc += weight[:, None] * value.to(tl.float32)
        peak = top
    if start < stop:
        acc, peak, total = attend_tile(queries, keys, values, seen, acc, peak, total, scale)
    for at in range(start + TOKENS, stop, TOKENS):
        position, seen, key_places, value_places = _places(
            table, cache, at, stop, kv, d, KV_HEADS, HEAD_DIM, PAGE, TOKENS
        )  # fmt: skip
        keys, values = _read(key_places, value_places, seen, inside, 0.0, 0.0)
        acc, peak, total = attend_tile(queries, keys, values, seen, acc, peak, total, scale)
    store_stretch(
        acc, peak, total, qkv, cache, out, out_scales, partial, peaks, totals, value_scale, out_rows, row, head, split,
        known, HEADS, HEAD_DIM, SPLITS, DIM, LARGEST,
    )  # fmt: skip


def takes(qkv_dtype: torch.dtype, head_dim: int) -> bool:
    """Whether that is quicker than two launches."""
    return starts_early() and qkv_dtype != torch.float32 and head_dim <= MOST_DIMENSIONS


def decode_early(
    qkv: Tensor,
    heads: int,
    cache: Tensor,
    decode: DecodeRows,
    window: int | None,
    scale: float,
    out: Tensor | Quantised,
    value_scale: float,
    sinks: Tensor | None,
    fresh: Fresh,
) -> None:
    """As `attention.decode_attention`, of what is fresh."""
    values, scales, out_rows = places_of(out)
    (rows, _, head_dim), (_, page, _, kv_heads, _) = qkv.shape, cache.shape
    tables, splits = decode.tables, splits_of(rows, kv_heads, decode.uneven)
    cos, sin, write_to, (key_scale, own_scale) = fresh
    dim = max(16, triton.next_power_of_2(head_dim))
    partial = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=qkv.device)
    peaks, totals = (torch.empty(rows, heads, splits, dtype=torch.float32, device=qkv.device) for _ in range(2))
    _decode_early[(kv_heads, rows, splits)](
        qkv, cache, tables, decode.slots, decode.positions, cos, sin, write_to, sinks, values, scales, partial,
        peaks, totals, qkv.stride(0), len(tables), tables.stride(0), window or 0, scale, value_scale, out_rows,
        1 / key_scale, 1 / own_scale, SINKS=sinks is not None, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        PAGE=page, SPLITS=splits, GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), DIM=dim, TOKENS=TOKENS,
        ROTARY=cos.shape[-1], LARGEST=LARGEST, num_stages=STAGES, launch_pdl=True,
        num_warps=SHORT_WARPS if dim <= SHORT_DIMENSIONS else WARPS,
    )  # fmt: skip
    if splits > 1:
        join_splits(partial, peaks, totals, qkv[:, :heads], out)
