"""Latent attention where latents lie: one token a sequence, chosen tokens, and prompts with tokens of earlier steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.gemm import HAS_GLUON
from phalanx.kernels.gpu.shared_memory import is_hopper, is_roomy
from phalanx.kernels.tiling import PROMPT_TILE, DecodeRows, PrefillTiles

if HAS_GLUON:
    from phalanx.kernels.gpu import latent_stream

READERS = 128
"""Programs that fill a large GPU: each takes most of a processor's shared memory."""

MOST_SPLITS = 64
UNEVEN_SPLITS = 16
COLUMNS_AT_ONCE = 64

FEW_PARTS = 4
"""Of a sequence, that are joined without a look at whether there are so many."""


class LatentQueries(NamedTuple):
    """The queries of a step: where latents are, [tokens, heads, kv_rank], and as they came, [tokens, heads, nope_dim +
    rope_dim], whose last dimensions are still to be turned by `cos` and `sin`.
    """

    brought: Tensor
    q: Tensor
    cos: Tensor
    sin: Tensor


@triton.jit
def turned(q, cos, sin, d, mask, ROPE: tl.constexpr):
    """The rotated part of queries: `q`, `cos` and `sin` point at its first dimension."""
    other = (d + ROPE // 2) % ROPE
    straight, across = tl.load(q + d, mask=mask, other=0.0), tl.load(q + other, mask=mask, other=0.0)
    near, far = tl.load(cos + d, mask=mask, other=0.0), tl.load(sin + d, mask=mask, other=0.0)
    rotated = straight.to(tl.float32) * near.to(tl.float32) + across.to(tl.float32) * far.to(tl.float32)
    return rotated.to(straight.dtype)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _attend_latents(
    brought, q, cos, sin, cache, tables, slots, positions, tiles, chosen, out, partial, peaks, totals, table_width,
    scale, HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, TILED: tl.constexpr, TOP: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    RANK_WIDE: tl.constexpr, ROPE_WIDE: tl.constexpr,
):  # fmt: skip
    """Some heads of a token, or of some tokens of a prompt, against one stretch of what they look at.

    Heads are columns and cached tokens are rows, of the scores and of what is attended: rows fill the tensor cores
    however few the heads. A block of latents is read once, as keys and as values. `scale` is for powers of 2.
    """
    let_next_start()
    row, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_ahead()
    if TILED:
        tile = tiles + row * 5
        sequence, first, count, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
        first = first.to(tl.int64)
        if tl.program_id(0) * COLUMNS >= count * HEADS:
            return
    else:
        sequence, first, count, start = tl.load(slots + row), row, 1, tl.load(positions + row).to(tl.int32)
    known = column < count * HEADS
    asked = start + column // HEADS
    d, r = tl.arange(0, RANK_WIDE), tl.arange(0, ROPE_WIDE)
    token = first + column // HEADS
    place = first * HEADS + column
    low = tl.load(brought + place[None, :] * RANK + d[:, None], mask=known[None, :] & (d[:, None] < RANK), other=0.0)
    high = turned(
        q + place[None, :] * (NOPE + ROPE) + NOPE, cos + token[None, :] * ROPE, sin + token[None, :] * ROPE,
        r[:, None], known[None, :] & (r[:, None] < ROPE), ROPE,
    )  # fmt: skip
    table = tables + sequence.to(tl.int64) * table_width
    reach = start + tl.minimum(count, tl.cdiv((tl.program_id(0) + 1) * COLUMNS, HEADS))
    if TOP:
        reach = tl.minimum(reach, TOP)
    share = tl.cdiv(tl.cdiv(reach, TOKENS), SPLITS) * TOKENS
    begin = split * share
    stop = tl.minimum(begin + share, reach)
    peak = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    acc = tl.zeros([RANK_WIDE, COLUMNS], tl.float32)
    for at in range(begin, stop, TOKENS):
        seen = at + tl.arange(0, TOKENS) < stop
        position = tl.minimum(at + tl.arange(0, TOKENS), stop - 1)
        if TOP:
            position = tl.load(chosen + row * TOP + position)
        position = position.to(tl.uint32)  # never below zero, which divides more quickly
        page = tl.load(table + position // PAGE).to(tl.int64)
        entry = cache + ((page * PAGE + position % PAGE) * (RANK + ROPE))[:, None]
        latents = tl.load(entry + d, mask=d[None, :] < RANK, other=0.0)
        keys = tl.load(entry + RANK + r, mask=r[None, :] < ROPE, other=0.0)
        scores = tl.dot(latents, low, input_precision="ieee")
        scores = tl.dot(keys, high, scores, input_precision="ieee") * scale
        if TILED:
            scores = tl.where((position.to(tl.int32)[:, None] <= asked[None, :]) & seen[:, None], scores, -1.0e30)
        else:
            scores = tl.where(seen[:, None], scores, -1.0e30)
        top = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.exp2(scores - top[None, :])
        shrink = tl.exp2(peak - top)
        total = total * shrink + tl.sum(weights, 0)
        acc = tl.dot(tl.trans(latents), weights.to(latents.dtype), acc * shrink[None, :], input_precision="ieee")
        peak = top
    inside = (d[:, None] < RANK) & known[None, :]
    if SPLITS == 1:
        result = (acc / total[None, :]).to(out.dtype.element_ty)
        tl.store(out + place[None, :] * RANK + d[:, None], result, mask=inside)
    else:
        spot = place * SPLITS + split
        tl.store(peaks + spot, peak, mask=known)
        tl.store(totals + spot, total, mask=known)
        if begin < stop:
            tl.store(partial + spot[None, :] * RANK + d[:, None], acc, mask=inside)


@triton.jit
def join_parts(
    partial, peaks, totals, out, RANK: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, FEW: tl.constexpr = 1
):
    """Some numbers of one head: its partial sums, each brought to the common peak. Empty stretches have none.

    The first few are asked for along with their totals, before it is known which are empty.
    """
    let_next_start()
    place = tl.program_id(0).to(tl.int64) * SPLITS
    s, few = tl.arange(0, SPLITS), tl.arange(0, FEW)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (d < RANK)[None, :]
    wait_for_ahead()
    peak, total = tl.load(peaks + place + s), tl.load(totals + place + s)
    few_peaks, few_totals = tl.load(peaks + place + few), tl.load(totals + place + few)
    few_parts = tl.load(partial + (place + few)[:, None] * RANK + d, mask=inside, other=0.0)
    top = tl.max(peak, 0)
    shrink = tl.exp2(peak - top)
    joined = tl.sum(tl.where((few_totals > 0.0)[:, None], few_parts * tl.exp2(few_peaks - top)[:, None], 0.0), 0)
    if FEW < SPLITS:
        more = (total > 0.0) & (s >= FEW)
        if tl.max(more.to(tl.int32), 0) > 0:
            parts = tl.load(partial + (place + s)[:, None] * RANK + d, mask=more[:, None] & inside, other=0.0)
            joined += tl.sum(parts * shrink[:, None], 0)
    joined /= tl.sum(total * shrink, 0)
    tl.store(out + tl.program_id(0).to(tl.int64) * RANK + d, joined.to(out.dtype.element_ty), mask=d < RANK)


class LatentTile(NamedTuple):
    """How the kernel is cut: columns and cached tokens at once, warps, stages."""

    columns: int
    tokens: int
    warps: int
    stages: int


def shape_of(columns: int, dtype: torch.dtype) -> LatentTile:
    columns = min(COLUMNS_AT_ONCE, max(16, triton.next_power_of_2(columns)))
    if dtype == torch.float32:
        return LatentTile(16, 16, 4, 1)
    if not is_hopper():
        return LatentTile(min(columns, 32), 32, 4, 3) if is_roomy() else LatentTile(min(columns, 32), 16, 4, 2)
    return LatentTile(columns, 64, 8 if columns > 32 else 4, 3)


def splits_of(programs: int, uneven: bool) -> int:
    """The parts of every sequence; with so many programs if there were one each."""
    wanted = max(1, min(MOST_SPLITS, READERS // programs))
    return 1 << (max(wanted, UNEVEN_SPLITS if uneven else 1).bit_length() - 1)


def decode_latents(
    asked: LatentQueries, cache: Tensor, decode: DecodeRows, scale: float, out: Tensor, chosen: Tensor | None = None
) -> None:
    """One token a sequence against all that is cached, or what is `chosen`, [rows, top], the best first, into `out`.

    Nothing here depends on lengths on the host, but for what `decode` says of them: a graph serves all others.
    """
    rows, heads, rank = len(decode.positions), *asked.brought.shape[1:]
    shape = shape_of(heads, asked.q.dtype)
    groups = triton.cdiv(heads, shape.columns)
    splits = splits_of(rows * groups, decode.uneven)
    partial = torch.empty(rows, heads, splits, rank, dtype=torch.float32, device=out.device) if splits > 1 else None
    peaks, totals = (torch.empty(rows, heads, splits, dtype=torch.float32, device=out.device) for _ in range(2))
    if HAS_GLUON and chosen is None and latent_stream.attends(asked.q, rank, asked.cos.shape[-1], cache):
        latent_stream.attend(
            *asked, cache, decode.tables, decode.slots, decode.positions, scale, out, partial, peaks, totals, splits
        )
    else:
        _launch(
            (groups, rows, splits), shape, asked, cache, decode.tables, scale, out, SPLITS=splits, slots=decode.slots,
            positions=decode.positions, chosen=chosen, partial=partial, peaks=peaks, totals=totals,
        )  # fmt: skip
    if splits > 1:
        columns = min(64, triton.next_power_of_2(rank))
        join_parts[(rows * heads, triton.cdiv(rank, columns))](
            partial, peaks, totals, out, RANK=rank, SPLITS=splits, FEW=min(splits, FEW_PARTS), COLUMNS=columns,
            num_warps=2, launch_pdl=starts_early(),
        )  # fmt: skip


def prefill_latents(asked: LatentQueries, cache: Tensor, cut: PrefillTiles, scale: float, out: Tensor) -> None:
    """Tiles of prompts against what is cached of their sequences, this step's tokens included."""
    heads = asked.q.shape[1]
    shape = shape_of(COLUMNS_AT_ONCE, asked.q.dtype)
    grid = (triton.cdiv(PROMPT_TILE * heads, shape.columns), len(cut.tiles), 1)
    _launch(grid, shape, asked, cache, cut.tables, scale, out, SPLITS=1, tiles=cut.tiles)


def _launch(
    grid: tuple[int, int, int],
    shape: LatentTile,
    asked: LatentQueries,
    cache: Tensor,
    tables: Tensor,
    scale: float,
    out: Tensor,
    SPLITS: int,
    **places: Tensor | None,
) -> None:
    (_, heads, head_dim), rank, rope = asked.q.shape, asked.brought.shape[2], asked.cos.shape[-1]
    found = {name: places.get(name) for name in ("slots", "positions", "tiles", "chosen", "partial", "peaks", "totals")}
    chosen = found["chosen"]
    _attend_latents[grid](
        *asked, cache, tables, out=out, table_width=tables.stride(0), scale=scale * 1.4426950408889634, HEADS=heads,
        NOPE=head_dim - rope, ROPE=rope, RANK=rank, PAGE=cache.shape[1], SPLITS=SPLITS,
        TILED=found["tiles"] is not None, TOP=0 if chosen is None else chosen.shape[1], COLUMNS=shape.columns,
        TOKENS=shape.tokens, RANK_WIDE=max(16, triton.next_power_of_2(rank)),
        ROPE_WIDE=max(16, triton.next_power_of_2(rope)), num_warps=shape.warps, num_stages=shape.stages,
        launch_pdl=starts_early(), **found,
    )  # fmt: skip
