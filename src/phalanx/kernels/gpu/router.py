"""A norm, a router's product with what it gives, and the choice of experts in one launch, for few rows.

Some programs compute scores, each of some experts; others, one for every row, wait for all scores of theirs and choose.
All norm the rows they take, where that is asked for, and those who choose write down what comes of it.
A score is put into a place that was blank, and whoever has waited for it leaves a blank again: nobody counts, and no
memory has to settle before it is told so. Those who compute wait for nobody, and those who do are too few to keep them
from the GPU; the next kernel is not let in before the last program of this one is.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.fp8 import GROUP, LARGEST, Activations, plain
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.route import (
    LANES,
    NOTHING,
    choose_and_store,
    empty_choice,
    numbers_of_experts,
    routes,
    way_to_choose,
)
from phalanx.kernels.gpu.rows import Places, empty_in, norm_and_store, norm_of, warps_of_row
from phalanx.kernels.gpu.stamps import stamp_begin, taken
from phalanx.kernels.unnormed import Unnormed
from phalanx.spec.ffn import Router

MOST_INPUTS = 8192
"""All that a program multiplies by is in its registers before the kernel ahead ends."""

BLANK, NOT_A_NUMBER = tl.constexpr(-1), tl.constexpr(0x7FFFFFFF)

_PLACES = ["correction", "told", "blanks", "weights", "chosen"]
"""As in `route`."""


class Share(NamedTuple):
    """What one program computes: so many scores, of so many rows after each other."""

    outputs: int
    rows: int


def share_of(rows: int, weight: Tensor) -> Share:
    """A small weight is read again for every row, from the GPU's cache; a large one is read once."""
    if weight.nbytes > 2**21:
        return Share(4, 4) if rows > 1 else Share(2, 1)
    return Share(2 if len(weight) <= 128 else 4, 1)


@triton.jit
def _taken(x, residual, row, width, column, mask):
    h = tl.load(x + row * width + column, mask=mask, other=0.0)
    if residual is not None:
        h += tl.load(residual + row * width + column, mask=mask, other=0.0)
    return h


@triton.jit
def _score(
    x, residual, norm_weight, weight, bias, blanks, rows, width, eps, outputs, stamp, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """The next row is asked for while one is multiplied; the weights before the kernel ahead has ended."""
    parts = tl.cdiv(outputs, OUTPUTS)
    output = tl.program_id(0) % parts * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(0) // parts * ROWS
    stop = tl.minimum(first + ROWS, rows)
    column = tl.arange(0, INPUTS)
    wanted, inside = output < outputs, column < width
    at = weight + output[:, None].to(tl.int64) * width + column[None, :]
    block = tl.load(at, mask=wanted[:, None] & inside[None, :], other=0.0)
    if norm_weight is not None:
        scale = tl.load(norm_weight + column, mask=inside, other=0.0)
    if bias is not None:
        added = tl.load(bias + output, mask=wanted, other=0.0).to(tl.float32)
    wait_for_ahead()
    taken = _taken(x, residual, first, width, column, inside)
    stamp_begin(stamp)
    for row in range(first, stop):
        values = taken
        if ROWS > 1:
            taken = _taken(x, residual, row + 1, width, column, inside & (row + 1 < stop))
        if norm_weight is not None:
            values = norm_of(values, scale, width, eps)
        y = tl.sum(values.to(tl.float32)[None, :] * block.to(tl.float32), 1)
        if bias is not None:
            y += added
        bits = y.to(weight.dtype.element_ty).to(tl.float32).to(tl.int32, bitcast=True)
        tl.store(blanks + row * outputs + output, tl.where(bits == BLANK, NOT_A_NUMBER, bits), mask=wanted)


@triton.jit
def _has_blanks(bits):
    """In every warp."""
    return tl.max(tl.max((bits == BLANK).to(tl.int32), 2), 1)


@triton.jit
def _awaited(scores, expert, slot, experts, TOP: tl.constexpr, GATED: tl.constexpr):
    """What others put there: the scores of experts, and the gate's in slot TOP. All have been read before one is blank
    again.
    """
    known, is_gate = expert < experts, slot == TOP
    place, behind = scores + expert, scores + experts + slot - TOP
    bits, gate = tl.full(expert.shape, BLANK, tl.int32), tl.zeros(slot.shape, tl.int32)
    blanks = 1
    while blanks > 0:
        bits = tl.load(place, mask=known, other=0, volatile=True)
        found = _has_blanks(bits)
        if GATED:
            gate = tl.load(behind, mask=is_gate, other=0, volatile=True)
            found = tl.maximum(found, _has_blanks(gate))
        blanks = tl.max(found, 0)
    tl.debug_barrier()
    tl.store(place, BLANK, mask=known)
    if GATED:
        tl.store(behind, BLANK, mask=is_gate)
    value = tl.where(known, bits.to(tl.float32, bitcast=True), NOTHING)
    return value, gate.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_PLACES)
def _score_and_route(
    x, residual, kept, norm_weight, out, out_fp8, out_scales, weight, bias, blanks, correction, told, weights, chosen,
    rows, width, eps, outputs, experts, scaling, stamp, GATED: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    INPUTS: tl.constexpr, LARGEST: tl.constexpr, WARPS: tl.constexpr, SCORE: tl.constexpr, RENORMALISE: tl.constexpr,
    JOINED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    let_next_start()
    scoring = tl.cdiv(outputs, OUTPUTS) * tl.cdiv(rows, ROWS)
    if tl.program_id(0) < scoring:
        _score(
            x, residual, norm_weight, weight, bias, blanks, rows, width, eps, outputs, stamp, OUTPUTS, ROWS, INPUTS
        )  # fmt: skip
    else:
        row = tl.program_id(0) - scoring
        expert = numbers_of_experts(BLOCK, WIDTH, WARPS)
        known = expert < experts
        added = None
        if correction is not None:
            added = tl.load(correction + expert, mask=known, other=0.0).to(tl.float32)
        if norm_weight is not None:
            column = tl.arange(0, INPUTS)
            scale = tl.load(norm_weight + column, mask=column < width, other=0.0)
        wait_for_ahead()
        if norm_weight is not None:
            h = _taken(x, residual, row, width, column, column < width)
            tl.store(kept + row * width + column, h, mask=column < width)
            norm_and_store(h, scale, out, out_fp8, out_scales, row, rows, width, eps, INPUTS, LARGEST)
        slot = tl.broadcast_to(tl.arange(0, SLOTS)[None, None, :], (WARPS, 1, SLOTS))
        value, gate = _awaited(blanks + row * outputs, expert, slot, experts, TOP, GATED)
        opening = None
        if GATED:
            opening = gate
        choose_and_store(
            value, expert, added, told, opening, weights, chosen, row, experts, scaling, weight.dtype.element_ty,
            SCORE, RENORMALISE, JOINED, GROUPS, KEPT, TOP, SLOTS, BLOCK, WIDTH, WARPS,
        )  # fmt: skip


def routes_at_once(weight: Tensor, router: Router, correction: Tensor | None) -> bool:
    return weight.shape[1] <= MOST_INPUTS and routes(router, correction)


def score_and_route(
    x: Activations | Unnormed, weight: Tensor, bias: Tensor | None, router: Router, correction: Tensor | None,
    blanks: Tensor, told: Tensor | None, joined: bool,
) -> tuple[Activations, Tensor, Tensor]:  # fmt: skip
    """x, normed, and `route` of x @ weight.T + bias, in the weight's precision; its last row may be a gate's."""
    places: Places
    if isinstance(x, Unnormed):
        given, residual, kept, norm_weight, eps, form = x
        normed, places = empty_in(form, given, *given.shape)
        stamp = taken()
    else:
        normed, given, places = x, plain(x), (None, None, None)
        residual, kept, norm_weight, eps, stamp = None, None, None, 0.0, None
    rows, (outputs, width) = len(given), weight.shape
    weights, chosen = empty_choice(rows, router.experts_per_token + joined, given.device)
    share, warps = share_of(rows, weight), warps_of_row(width)
    way = way_to_choose(router, correction, told, joined)
    if way["GROUPS"] == 1:
        way |= {"BLOCK": max(LANES, way["BLOCK"]), "WIDTH": LANES}
    scoring = triton.cdiv(outputs, share.outputs) * triton.cdiv(rows, share.rows)
    _score_and_route[(scoring + rows,)](
        given.contiguous(), residual, kept, norm_weight, *places, weight, bias, blanks, correction, told, weights,
        chosen, rows, width, eps, outputs, router.experts, router.scaling, stamp, GATED=outputs > router.experts,
        OUTPUTS=share.outputs, ROWS=share.rows, INPUTS=max(GROUP, triton.next_power_of_2(width)), LARGEST=LARGEST,
        WARPS=warps, **way, num_warps=warps, launch_pdl=starts_early(),
    )  # fmt: skip
    return normed, weights, chosen
