"""Compressed attention: a window of vectors and entries that stand for many tokens, in one go."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.compressed_rows import kept_of, place_of
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.latent import join_parts, shape_of, splits_of
from phalanx.kernels.tiling import DecodeRows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _attend_compressed(
    q, new, ring, entries, tables, slots, positions, chosen, sinks, out, partial, peaks, totals, table_width, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, RATIO: tl.constexpr,
    PAGE: tl.constexpr, ROOM: tl.constexpr, TOP: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Some heads of a token against one stretch of what it looks at: the vectors of its window, then entries.

    Heads are columns and what is kept are rows, of the scores and of what is attended; it is read once, as keys and as
    values. A sink is where the first stretch begins to sum up. `scale` is for powers of 2.
    """
    let_next_start()
    row, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    head, d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    wait_for_ahead()
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row).to(tl.int32)
    known, table = head < HEADS, tables + slot * table_width
    place = row * HEADS + head
    inside = (d[:, None] < DIM) & known[None, :]
    queries = tl.load(q + place[None, :] * DIM + d[:, None], mask=inside, other=0.0)
    near = tl.minimum(position + 1, WINDOW)
    reach = near
    if RATIO:
        far = (position + 1) // RATIO
        reach += tl.minimum(far, TOP) if TOP else far
    share = tl.cdiv(tl.cdiv(reach, TOKENS), SPLITS) * TOKENS
    begin = split * share
    stop = tl.minimum(begin + share, reach)
    sink = tl.load(sinks + head, mask=known, other=0.0).to(tl.float32) * LOG2_E
    peak = tl.where(split == 0, sink, float("-inf"))
    total = tl.where(split == 0, 1.0, 0.0) + tl.zeros([COLUMNS], tl.float32)
    acc = tl.zeros([WIDE, COLUMNS], tl.float32)
    for at in range(begin, stop, TOKENS):
        number = at + tl.arange(0, TOKENS)
        seen = number < stop
        in_window = number < near
        back = near - 1 - number
        base = kept_of(
            new, ring, slots, positions, row - back, slot, position - back, seen & in_window, RING, DIM
        )  # fmt: skip
        if RATIO:
            is_entry = seen & (number >= near)
            entry = number - near
            if TOP:
                entry = tl.load(chosen + row * TOP + entry, mask=is_entry, other=0).to(tl.int32)
            found = place_of(table, entry, is_entry, table_width, RATIO, PAGE, ROOM)
            base = tl.where(in_window, base, entries + found * DIM)
        kept = tl.load(base[:, None] + d, mask=seen[:, None] & (d < DIM), other=0.0)
        scores = tl.dot(kept, queries, input_precision="ieee") * scale
        scores = tl.where(seen[:, None], scores, -1.0e30)
        top = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.exp2(scores - top[None, :])
        shrink = tl.exp2(peak - top)
        total = total * shrink + tl.sum(weights, 0)
        acc = tl.dot(tl.trans(kept), weights.to(kept.dtype), acc * shrink[None, :], input_precision="ieee")
        peak = top
    if SPLITS == 1:
        tl.store(out + place[None, :] * DIM + d[:, None], (acc / total[None, :]).to(out.dtype.element_ty), mask=inside)
    else:
        spot = place * SPLITS + split
        tl.store(peaks + spot, peak, mask=known)
        tl.store(totals + spot, total, mask=known)
        if begin < stop:
            tl.store(partial + spot[None, :] * DIM + d[:, None], acc, mask=inside)


def attend(
    q: Tensor, new: Tensor, ring: Tensor, entries: Tensor | None, ratio: int, block_size: int, rows: DecodeRows,
    window: int, chosen: Tensor | None, sinks: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Every row of q, [tokens, heads, head_dim], against the last `window` vectors and against entries, of `ratio`
    tokens each, that are complete: all of them, or what is `chosen`, [tokens, top], the best first.

    `new` are the vectors of this step, and `ring` has earlier ones. Nothing here depends on lengths on the host.
    """
    tokens, heads, dim = q.shape
    shape, out = shape_of(heads, q.dtype), torch.empty_like(q)
    groups = triton.cdiv(heads, shape.columns)
    top = 0 if chosen is None else chosen.shape[1]
    most = window + (top or (rows.tables.shape[1] * block_size // ratio if ratio else 0))
    steps = max(1, most // shape.tokens)
    splits = min(splits_of(tokens * groups, rows.uneven), 1 << (steps.bit_length() - 1))
    partial = torch.empty(tokens, heads, splits, dim, dtype=torch.float32, device=q.device) if splits > 1 else None
    peaks, totals = (torch.empty(tokens, heads, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    _attend_compressed[(groups, tokens, splits)](
        q, new, ring, entries, rows.tables, rows.slots, rows.positions, chosen, sinks, out, partial, peaks, totals,
        rows.tables.stride(0), scale * LOG2_E.value, HEADS=heads, DIM=dim, WINDOW=window, RING=ring.shape[1],
        RATIO=ratio, PAGE=block_size, ROOM=1 if entries is None else entries.shape[1], TOP=top, SPLITS=splits,
        COLUMNS=shape.columns, TOKENS=shape.tokens, WIDE=max(16, triton.next_power_of_2(dim)), num_warps=shape.warps,
        num_stages=shape.stages, launch_pdl=starts_early(),
    )  # fmt: skip
    if splits > 1:
        columns = min(64, triton.next_power_of_2(dim))
        join_parts[(tokens * heads, triton.cdiv(dim, columns))](
            partial, peaks, totals, out, RANK=dim, SPLITS=splits, COLUMNS=columns, num_warps=2,
            launch_pdl=starts_early(),
        )  # fmt: skip
    return out
