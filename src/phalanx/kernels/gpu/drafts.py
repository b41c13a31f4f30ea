"""`kernels.drafts` on a GPU, one launch each: a draft is so short that a handful of small ones shows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.draft_rows import Cache, Guess, Sequences, Standing, StepRows
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.rows import norm_and_store
from phalanx.kernels.sampling_table import TOKEN

_ROWS = 128
_FROM_COLUMNS = ["slots", "positions", "yields", "wanted", "of", "rooms", "firsts", "samples"]
"""Parts of one tensor, which begin at any number."""


@triton.jit
def _place(
    tables, of, at, has_room, index, exists, count, slots_out, at_out, places_out, group_stride, slot_stride, spare,
    GROUPS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Write down where position `at` of these slots lies, or the first of the spare slot."""
    slot, at = tl.where(has_room, of, spare), tl.where(has_room, at, 0)
    tl.store(slots_out + index, slot, mask=exists)
    tl.store(at_out + index, at, mask=exists)
    for group in tl.static_range(GROUPS):
        entry = tables + group * group_stride + slot * slot_stride + at // PAGE
        block = tl.load(entry, mask=exists, other=0).to(tl.int64)
        tl.store(places_out + group * count + index, block * PAGE + at % PAGE, mask=exists)


@triton.jit(do_not_specialize=["rows", "sequences", "most", "ahead"], do_not_specialize_on_alignment=_FROM_COLUMNS)
def _prove(
    kept, tables, slots, positions, tokens, yields, wanted, sampled, of, rooms, firsts, samples,
    following, lasts, chosen, last_at, counts, slots_out, at_out, places_out, after,
    rows, sequences, most, ahead, group_stride, slot_stride, furthest, spare,
    OFFSET: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    let_next_start()
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wait_for_ahead()
    exists = index < rows
    slot, number = tl.load(slots + index, mask=exists, other=0), tl.load(yields + index, mask=exists, other=0)
    behind = tl.minimum(tl.load(positions + index, mask=exists, other=0) + 1, furthest)
    block = tl.load(tables + slot * slot_stride + behind // PAGE, mask=exists, other=0).to(tl.int64)
    known = tl.load(kept + block * PAGE + behind % PAGE, mask=exists & (number < 0), other=0)
    drawn = tl.load(sampled + number, mask=exists & (number >= 0), other=0).to(known.dtype)
    tl.store(following + index, tl.where(number < 0, known, tl.maximum(drawn, 0)), mask=exists)

    exists = index < sequences
    first, yielded = tl.load(firsts + index, mask=exists, other=0), tl.load(samples + index, mask=exists, other=1)
    proven, right = first, exists
    for place in range(most - 1):
        may = right & (place < yielded - 1)
        row = tl.load(wanted + first + place, mask=may, other=0)
        drafted = tl.load(tokens + row + 1, mask=may, other=0)
        drawn = tl.maximum(tl.load(sampled + first + place, mask=may, other=0), 0)
        right = may & (drafted == drawn.to(drafted.dtype))
        proven += right.to(tl.int64)
    last = tl.load(wanted + proven, mask=exists, other=0)
    at = tl.load(positions + last, mask=exists, other=0)
    slot, room = tl.load(of + index, mask=exists, other=0), tl.load(rooms + index, mask=exists, other=0)
    tl.store(lasts + index, last, mask=exists)
    token = tl.load(sampled + proven, mask=exists, other=0).to(chosen.dtype.element_ty)
    tl.store(chosen + index, tl.maximum(token, 0), mask=exists)
    tl.store(last_at + index, at, mask=exists)
    tl.store(counts + index, tl.minimum(tl.maximum(room - at - OFFSET, 0), ahead), mask=exists)
    tl.store(after + index, at + 2, mask=exists)
    _place(
        tables, slot, at + OFFSET, at + OFFSET < room, index, exists, sequences, slots_out, at_out, places_out,
        group_stride, slot_stride, spare, GROUPS, PAGE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "number", "ahead"], do_not_specialize_on_alignment=["of", "rooms"])
def _keep_draft(
    kept, tables, of, rooms, last_at, tokens, drafts, slots_out, at_out, places_out, after, sequences, number, ahead,
    group_stride, slot_stride, spare, OFFSET: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    let_next_start()
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = index < sequences
    slot, room = tl.load(of + index, mask=exists, other=0), tl.load(rooms + index, mask=exists, other=0)
    wait_for_ahead()
    last, token = tl.load(last_at + index, mask=exists, other=0), tl.load(tokens + index, mask=exists, other=0)
    tl.store(drafts + index * ahead + number, token.to(drafts.dtype.element_ty), mask=exists)
    at = last + 2 + number
    has_room = exists & (at < room)
    block = tl.load(tables + slot * slot_stride + at // PAGE, mask=has_room, other=0).to(tl.int64)
    tl.store(kept + block * PAGE + at % PAGE, token.to(kept.dtype.element_ty), mask=has_room)
    tl.store(after + index, at + 1, mask=exists)
    at = last + OFFSET + number + 1
    _place(
        tables, slot, at, at < room, index, exists, sequences, slots_out, at_out, places_out,
        group_stride, slot_stride, spare, GROUPS, PAGE,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _side_by_side(
    embedded, tokens, handed, embedded_norm, handed_norm, out, width, eps, LOOKED_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One half of a row."""
    let_next_start()
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < width
    if half == 0:
        scale = tl.load(embedded_norm + column, mask=mask, other=0.0)
        wait_for_ahead()
        at = tl.load(tokens + row).to(tl.int64) if LOOKED_UP else row
        h = tl.load(embedded + at * width + column, mask=mask, other=0.0)
    else:
        scale = tl.load(handed_norm + column, mask=mask, other=0.0)
        wait_for_ahead()
        h = tl.load(handed + row * width + column, mask=mask, other=0.0)
    norm_and_store(h, scale, out, None, None, 2 * row + half, 0, width, eps, BLOCK, 0.0)


def _numbers(like: Tensor, *shape: int) -> Tensor:
    """Each tensor on its own, so that it begins where kernels read it fastest."""
    return like.new_empty(shape, dtype=torch.int64)


def _empty_guess(tables: Tensor, sequences: int) -> Guess:
    slots, positions, after = (_numbers(tables, sequences) for _ in range(3))
    return Guess(slots, positions, _numbers(tables, len(tables), sequences), after)


def prove(
    cache: Cache, rows: StepRows, sampled: Tensor, sequences: Sequences, most: int, offset: int, ahead: int
) -> Standing:
    (kept, tables, page), count, of = cache, len(rows.slots), len(sequences.slots)
    last, positions, counts = (_numbers(tables, of) for _ in range(3))
    following, tokens = (torch.empty(size, dtype=TOKEN, device=tables.device) for size in (count, of))
    guess = _empty_guess(tables, of)
    _prove[(triton.cdiv(max(count, of), _ROWS),)](
        kept, tables, *rows, sampled, *sequences, following, last, tokens, positions, counts, *guess, count, of,
        most, ahead, tables.stride(0), tables.stride(1), tables.shape[-1] * page - 1, tables.shape[1] - 1,
        OFFSET=offset, GROUPS=len(tables), PAGE=page, ROWS=_ROWS, launch_pdl=starts_early(),
    )  # fmt: skip
    return Standing(following, last, tokens, positions, counts, guess)


def keep_draft(
    cache: Cache, sequences: Sequences, positions: Tensor, drafts: Tensor, tokens: Tensor, number: int, offset: int
) -> Guess:
    (kept, tables, page), of = cache, len(positions)
    guess = _empty_guess(tables, of)
    _keep_draft[(triton.cdiv(of, _ROWS),)](
        kept, tables, sequences.slots, sequences.rooms, positions, tokens, drafts, *guess, of, number,
        drafts.shape[1], tables.stride(0), tables.stride(1), tables.shape[1] - 1,
        OFFSET=offset, GROUPS=len(tables), PAGE=page, ROWS=_ROWS, launch_pdl=starts_early(),
    )  # fmt: skip
    return guess


def side_by_side(
    embedded: Tensor, handed: Tensor, norms: tuple[Tensor, Tensor], eps: float, tokens: Tensor | None
) -> Tensor:
    rows, width = handed.shape
    out = handed.new_empty(rows, 2 * width)
    _side_by_side[(rows, 2)](
        embedded, tokens, handed, *norms, out, width, eps, LOOKED_UP=tokens is not None,
        BLOCK=triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4, launch_pdl=starts_early(),
    )  # fmt: skip
    return out
