"""Sampling without a sort: the likeliest token of each row, or one drawn at random.

Rows are read in stretches, so that one row keeps the whole GPU busy. What a token weighs is a whole number: sums are
exact in any order, and every rank and every batch gives the same token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.engine.output import NO_TOKEN
from phalanx.kernels import sampling_table
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.sampling_table import PARAMETERS, TOKEN

STRETCH = 4096
CHUNK = 128
EDGES = 16
CANDIDATES = 32768
CANDIDATES_AT_ONCE = 2048
ONE = tl.constexpr(sampling_table.ONE)
FARTHEST = tl.constexpr(0x7F800000)
"""The bits of an infinite depth. No depth is positive: the bits of their amounts are in order, the best one first."""
SLACK = tl.constexpr(1e-5)
"""How wrong a sum of weights in single precision can be, with a wide margin."""


@triton.jit
def scores_of(scores, row, width, column):
    """In float32; what is not a number, or lies beyond the row, cannot be drawn."""
    value = tl.load(scores + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
    return tl.where(value > float("-inf"), value, float("-inf"))


@triton.jit
def _weight(depth):
    return (tl.exp(depth) * ONE).to(tl.int64)


@triton.jit
def _amount(depth):
    return tl.abs(depth).to(tl.int32, bitcast=True)


@triton.jit
def _real(table, at):
    return tl.load(table + at).to(tl.float64, bitcast=True)


@triton.jit
def _asked(table, slots, row, PARAMETERS: tl.constexpr):
    """A row's temperature, or zero if it is greedy, its limit of tokens, its share of weight, and its lowest depth."""
    at = tl.load(slots + row) * PARAMETERS
    floor = tl.log(_real(table, at + 4)).to(tl.float32)
    return _real(table, at + 2).to(tl.float32), tl.load(table + at + 1), _real(table, at + 3), floor


@triton.jit
def first_best(value, column, width):
    """The largest value, and the first of the columns that have it."""
    top = tl.max(value, 0)
    return top, tl.min(tl.where(value == top, column, width), 0)


@triton.jit
def _best_of_stretch(scores, best, where, width, stretches, STRETCH: tl.constexpr):
    let_next_start()
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = stretch * STRETCH + tl.arange(0, STRETCH)
    wait_for_ahead()
    top, first = first_best(scores_of(scores, row, width, column), column, width)
    tl.store(best + row * stretches + stretch, top)
    tl.store(where + row * stretches + stretch, first)


@triton.jit
def _best_of_all(best, where, out, stretches, width, BLOCK: tl.constexpr):
    let_next_start()
    row, stretch = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait_for_ahead()
    value = tl.load(best + row * stretches + stretch, mask=stretch < stretches, other=float("-inf"))
    column = tl.load(where + row * stretches + stretch, mask=stretch < stretches, other=width)
    tl.store(out + row, first_best(value, column, width)[1])


def likeliest(scores: Tensor) -> Tensor:
    rows, width = scores.shape
    stretches = triton.cdiv(width, STRETCH)
    best = torch.empty(rows, stretches, dtype=torch.float32, device=scores.device)
    where = torch.empty(rows, stretches, dtype=torch.int32, device=scores.device)
    out = torch.empty(rows, dtype=TOKEN, device=scores.device)
    _best_of_stretch[(rows, stretches)](
        scores, best, where, width, stretches, STRETCH=STRETCH, launch_pdl=starts_early()
    )
    block = triton.next_power_of_2(stretches)
    _best_of_all[(rows,)](best, where, out, stretches, width, BLOCK=block, launch_pdl=starts_early())
    return out


@triton.jit
def _flag_broken(tokens, scores, out, stride, NO_TOKEN: tl.constexpr):
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    wait_for_ahead()
    token = tl.load(tokens + row)
    chosen = tl.load(scores + row * stride + token).to(tl.float32)
    tl.store(out + row, tl.where(tl.abs(chosen) < float("inf"), token, NO_TOKEN))


def flag_broken(tokens: Tensor, scores: Tensor) -> Tensor:
    out = torch.empty_like(tokens)
    _flag_broken[(len(tokens),)](
        tokens, scores, out, scores.stride(0), NO_TOKEN, num_warps=1, launch_pdl=starts_early()
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _survey(
    scores, table, slots, best, where, weights, moments, peaks, found, width, stretches,
    STRETCH: tl.constexpr, CHUNK: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    """The best of a stretch and what it weighs by it; for top-k its peaks, for top-p mean and square of its depths."""
    let_next_start()
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = stretch * STRETCH + tl.arange(0, STRETCH)
    at = row * stretches + stretch
    wait_for_ahead()
    temperature, top_k, top_p, _ = _asked(table, slots, row, PARAMETERS)
    value = scores_of(scores, row, width, column)
    top, first = first_best(value, column, width)
    tl.store(best + at, top)
    tl.store(where + at, first)
    if stretch == 0:
        tl.store(found + row, 0)
    if temperature > 0:
        depth = (value - tl.where(top > float("-inf"), top, 0.0)) * tl.div_rn(1.0, temperature)
        tl.store(weights + at, tl.sum(_weight(depth), 0))
        if top_k > 0:
            chunk = tl.arange(0, STRETCH // CHUNK)
            tl.store(peaks + at * (STRETCH // CHUNK) + chunk, tl.max(tl.reshape(value, (STRETCH // CHUNK, CHUNK)), 1))
        elif top_p < 1:
            near = tl.maximum(depth, -100.0)
            share = tl.exp(near) * near
            tl.store(moments + at * 2, tl.sum(share, 0))
            tl.store(moments + at * 2 + 1, tl.sum(share * near, 0))


@triton.jit
def _outline(best, weights, row, stretches, stretch, temperature):
    """A row's best score; by stretch, the depth of its best below that, and its weight by the row's best."""
    value = tl.load(best + row * stretches + stretch, mask=stretch < stretches, other=float("-inf"))
    weight = tl.load(weights + row * stretches + stretch, mask=stretch < stretches, other=0).to(tl.float64)
    top = tl.max(value, 0)
    fall = tl.where(value > float("-inf"), (value - top) * tl.div_rn(1.0, temperature), -1e4)
    return top, fall, weight * tl.exp(fall.to(tl.float64))


@triton.jit
def _kth_peak(peaks, row, count, top, temperature, top_k, BLOCK: tl.constexpr):
    """The depth of the k-th best chunk. At least k tokens reach it, since its own best one and those before do."""
    index = tl.arange(0, BLOCK)
    peak = tl.load(peaks + row * count + index, mask=index < count, other=float("-inf"))
    amount = _amount((peak - top) * tl.div_rn(1.0, temperature))
    low, high = tl.full((), 0, tl.int32), tl.full((), FARTHEST, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        enough = tl.sum((amount <= middle).to(tl.int32), 0) >= top_k
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
    return -low.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _bracket(
    scores, table, slots, best, weights, moments, peaks, edges, above, width, stretches, STRETCH: tl.constexpr,
    CHUNK: tl.constexpr, EDGES: tl.constexpr, STRETCHES: tl.constexpr, PEAKS: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Bounds of the cut. For top-k one that at least k tokens reach; for top-p edges and the weight above each.

    Cantelli's inequality says how far from the mean, in deviations, the cut of top-p can lie. The last edge is where
    min-p cuts; with it, mean and deviation say little, and edges reach from there to the best.
    """
    let_next_start()
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_ahead()
    temperature, top_k, top_p, floor = _asked(table, slots, row, PARAMETERS)
    if temperature > 0:
        each = tl.arange(0, STRETCHES)
        if top_k > 0:
            count = stretches * (STRETCH // CHUNK)
            if stretch == 0:
                top = _outline(best, weights, row, stretches, each, temperature)[0]
                least = float("-inf")
                if top_k <= count:
                    least = _kth_peak(peaks, row, count, top, temperature, top_k, PEAKS)
                tl.store(edges + row * EDGES, least)
        elif top_p < 1:
            top, fall, weight = _outline(best, weights, row, stretches, each, temperature)
            known = each < stretches
            place = moments + (row * stretches + each) * 2
            scale = tl.exp(fall)
            first, second = tl.load(place, mask=known, other=0.0), tl.load(place + 1, mask=known, other=0.0)
            own = weight.to(tl.float32) / ONE
            total = tl.sum(own, 0)
            mean = tl.sum(scale * first + own * fall, 0) / total
            square = tl.sum(scale * (second + 2 * fall * first) + own * fall * fall, 0) / total
            deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
            share = tl.minimum(tl.maximum(top_p.to(tl.float32), 1e-5), 1 - 1e-5)
            high = tl.minimum(mean + deviation * tl.sqrt((1 - share) / share) + 1e-3, 0.0)
            low = mean - deviation * tl.sqrt(share / (1 - share)) - 1e-3
            if floor > float("-inf"):
                high, low = 0.0, floor
            column = stretch * STRETCH + tl.arange(0, STRETCH)
            depth = (scores_of(scores, row, width, column) - top) * tl.div_rn(1.0, temperature)
            size = tl.where(depth >= floor, tl.exp(depth), 0.0)
            for index in tl.static_range(EDGES):
                edge = floor if index == EDGES - 1 else high + (low - high) * (index / (EDGES - 2))
                reached = tl.sum(tl.where(depth >= edge, size, 0.0), 0)
                tl.store(above + (row * stretches + stretch) * EDGES + index, reached)
                if stretch == 0:
                    tl.store(edges + row * EDGES + index, edge)


@triton.jit
def _span(edges, above, row, stretches, top_k, top_p, EDGES: tl.constexpr, STRETCHES: tl.constexpr):
    """Depths from which to which the last cut can lie: what is better is kept for sure, what is worse is not."""
    low, high = tl.load(edges + row * EDGES), float("inf")
    if top_k == 0:
        low, high = float("-inf"), float("-inf")
        if top_p < 1:
            stretch, index = tl.arange(0, STRETCHES)[:, None], tl.arange(0, EDGES)
            place = above + (row * stretches + stretch) * EDGES + index[None, :]
            reached = tl.sum(tl.load(place, mask=stretch < stretches, other=0.0), 0)
            edge = tl.load(edges + row * EDGES + index)
            enough = top_p.to(tl.float32) * tl.max(reached, 0)
            low = tl.max(tl.where(reached > enough * (1 + SLACK), edge, float("-inf")), 0)
            high = tl.min(tl.where(reached < enough * (1 - SLACK), edge, float("inf")), 0)
    return low, high


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _gather(
    scores, table, slots, best, weights, edges, above, sure, amounts, columns, found, width, stretches,
    STRETCH: tl.constexpr, EDGES: tl.constexpr, STRETCHES: tl.constexpr, CANDIDATES: tl.constexpr,
    PARAMETERS: tl.constexpr,
):  # fmt: skip
    """A stretch's weight that is kept for sure, its weight above the floor, and its candidates: what may be kept."""
    let_next_start()
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = stretch * STRETCH + tl.arange(0, STRETCH)
    wait_for_ahead()
    temperature, top_k, top_p, floor = _asked(table, slots, row, PARAMETERS)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (floor > float("-inf"))):
        top = _outline(best, weights, row, stretches, tl.arange(0, STRETCHES), temperature)[0]
        low, high = _span(edges, above, row, stretches, top_k, top_p, EDGES, STRETCHES)
        depth = (scores_of(scores, row, width, column) - top) * tl.div_rn(1.0, temperature)
        weight = tl.where(depth >= floor, _weight(depth), 0)
        place = sure + (row * stretches + stretch) * 2
        tl.store(place, tl.sum(tl.where(depth >= high, weight, 0), 0))
        tl.store(place + 1, tl.sum(weight, 0))
        may = (depth >= tl.maximum(low, floor)) & (depth < high) & (depth > float("-inf"))
        count = tl.sum(may.to(tl.int32), 0)
        if count > 0:
            index = tl.atomic_add(found + row, count) + tl.cumsum(may.to(tl.int32), 0) - 1
            fits = may & (index < CANDIDATES)
            tl.store(amounts + row * CANDIDATES + index, _amount(depth), mask=fits)
            tl.store(columns + row * CANDIDATES + index, column, mask=fits)


@triton.jit
def _tally(row_of, candidates, before, until, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr):
    """How many candidates are better than `before` and stand in columns below `until`, and what they weigh.

    Where there was no room for all of them, they are looked up in the row itself: whatever lies from `low` to `high`.
    """
    scores, row, width, top, temperature = row_of
    amounts, columns, count, low, high = candidates
    number, weight = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64)
    index = tl.arange(0, BLOCK)
    if count <= CANDIDATES:
        for start in range(0, count, BLOCK):
            place = row * CANDIDATES + start + index
            amount = tl.load(amounts + place, mask=start + index < count, other=FARTHEST)
            column = tl.load(columns + place, mask=start + index < count, other=width)
            chosen = (amount < before) & (column < until)
            number += chosen.to(tl.int32)
            weight += tl.where(chosen, _weight(-amount.to(tl.float32, bitcast=True)), 0)
    else:
        for start in range(0, tl.minimum(width, until), BLOCK):
            depth = (scores_of(scores, row, width, start + index) - top) * tl.div_rn(1.0, temperature)
            chosen = (depth >= low) & (depth < high) & (_amount(depth) < before) & (start + index < until)
            number += chosen.to(tl.int32)
            weight += tl.where(chosen, _weight(depth), 0)
    return tl.sum(number, 0), tl.sum(weight, 0)


@triton.jit
def _uniform(seed, position):
    state = seed.to(tl.uint64) * 0x9E3779B97F4A7C15 + (position + 1).to(tl.uint64) * 0xD1342543DE82EF95
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * (2.0**-53)


# As a constant 1, `stretches` breaks the compiler of Triton 3.6; positions are sent behind slots, at any even address.
@triton.jit(do_not_specialize=["stretches"], do_not_specialize_on_alignment=["slots", "positions"])
def _choose(
    scores, table, slots, positions, best, where, weights, edges, above, sure, amounts, columns, found, out, width,
    stretches, STRETCH: tl.constexpr, EDGES: tl.constexpr, STRETCHES: tl.constexpr, CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Cut among the candidates, find the stretch that the draw falls into, and the token in it."""
    let_next_start()
    row, each = tl.program_id(0).to(tl.int64), tl.arange(0, STRETCHES)
    wait_for_ahead()
    temperature, top_k, top_p, floor = _asked(table, slots, row, PARAMETERS)
    known = each < stretches
    top, token = first_best(
        tl.load(best + row * stretches + each, mask=known, other=float("-inf")),
        tl.load(where + row * stretches + each, mask=known, other=width),
        width,
    )
    if (temperature > 0) & (tl.abs(top) < float("inf")):
        weight = _outline(best, weights, row, stretches, each, temperature)[2]
        row_of = (scores, row, width, top, temperature)
        sums, count = weight.to(tl.int64), 0
        low, high, cut = float("-inf"), float("-inf"), tl.full((), FARTHEST, tl.int32)
        if (top_k > 0) | (top_p < 1) | (floor > float("-inf")):
            sums = tl.load(sure + (row * stretches + each) * 2, mask=known, other=0)
            total = tl.sum(tl.load(sure + (row * stretches + each) * 2 + 1, mask=known, other=0), 0)
            count = tl.load(found + row)
            low, high = _span(edges, above, row, stretches, top_k, top_p, EDGES, STRETCHES)
            low = tl.maximum(low, floor)
            cut = _amount(low)
            candidates = (amounts, columns, count, low, high)
            if top_k > 0:
                least = tl.full((), 0, tl.int32)
                while least < cut:
                    middle = least + (cut - least) // 2
                    enough = _tally(row_of, candidates, middle + 1, width, CANDIDATES, BLOCK)[0] >= top_k
                    least, cut = tl.where(enough, least, middle + 1), tl.where(enough, middle, cut)
                total = _tally(row_of, candidates, cut + 1, width, CANDIDATES, BLOCK)[1]
            if top_p < 1:
                least = tl.where(high < 0, _amount(high), 0)
                while least < cut:
                    middle = cut - (cut - least) // 2
                    better = tl.sum(sums, 0) + _tally(row_of, candidates, middle, width, CANDIDATES, BLOCK)[1]
                    needed = better.to(tl.float64) < top_p * total.to(tl.float64)
                    least, cut = tl.where(needed, middle, least), tl.where(needed, cut, middle - 1)
        candidates = (amounts, columns, count, low, high)
        total = tl.sum(sums, 0) + _tally(row_of, candidates, cut + 1, width, CANDIDATES, BLOCK)[1]
        seed = tl.load(table + tl.load(slots + row) * PARAMETERS)
        draw = _uniform(seed, tl.load(positions + row)) * total.to(tl.float64)
        target = tl.minimum(draw.to(tl.int64), total - 1)
        stretch, last, passed = tl.full((), 0, tl.int32), stretches - 1, tl.full((), 0, tl.int64)
        while stretch < last:
            middle = last - (last - stretch) // 2
            before = tl.sum(tl.where(each < middle, sums, 0), 0)
            before += _tally(row_of, candidates, cut + 1, middle * STRETCH, CANDIDATES, BLOCK)[1]
            later = before <= target
            passed = tl.where(later, before, passed)
            stretch, last = tl.where(later, middle, stretch), tl.where(later, last, middle - 1)
        column = stretch * STRETCH + tl.arange(0, STRETCH)
        depth = (scores_of(scores, row, width, column) - top) * tl.div_rn(1.0, temperature)
        size = tl.where(_amount(depth) <= cut, _weight(depth), 0)
        token = tl.min(tl.where(tl.cumsum(size, 0) + passed > target, column, width), 0)
        token = tl.minimum(token, tl.max(tl.where(size > 0, column, 0), 0))
    tl.store(out + row, token)


def draw(scores: Tensor, table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Four steps, of which rows that are greedy, or cut nothing, need only the first and the last."""
    rows, width = scores.shape
    stretches, device = triton.cdiv(width, STRETCH), scores.device
    real, whole, wide = (
        lambda *shape, dtype=dtype: torch.empty(rows, *shape, dtype=dtype, device=device)
        for dtype in (torch.float32, torch.int32, torch.int64)
    )
    room = min(CANDIDATES, triton.next_power_of_2(width))
    best, where, weights, moments = real(stretches), whole(stretches), wide(stretches), real(stretches, 2)
    peaks, edges, above = real(stretches, STRETCH // CHUNK), real(EDGES), real(stretches, EDGES)
    sure, amounts, columns, found, out = wide(stretches, 2), whole(room), whole(room), whole(), whole(dtype=TOKEN)
    sizes = {"STRETCH": STRETCH, "PARAMETERS": PARAMETERS, "launch_pdl": starts_early()}
    padded = {"EDGES": EDGES, "STRETCHES": triton.next_power_of_2(stretches)}
    grid = (rows, stretches)
    _survey[grid](
        scores, table, slots, best, where, weights, moments, peaks, found, width, stretches, CHUNK=CHUNK, **sizes
    )
    _bracket[grid](
        scores, table, slots, best, weights, moments, peaks, edges, above, width, stretches, CHUNK=CHUNK,
        PEAKS=triton.next_power_of_2(stretches * (STRETCH // CHUNK)), **padded, **sizes,
    )  # fmt: skip
    _gather[grid](
        scores, table, slots, best, weights, edges, above, sure, amounts, columns, found, width, stretches,
        CANDIDATES=room, **padded, **sizes,
    )  # fmt: skip
    _choose[(rows,)](
        scores, table, slots, positions, best, where, weights, edges, above, sure, amounts, columns, found, out, width,
        stretches, CANDIDATES=room, BLOCK=CANDIDATES_AT_ONCE, num_warps=8, **padded, **sizes,
    )  # fmt: skip
    return out
