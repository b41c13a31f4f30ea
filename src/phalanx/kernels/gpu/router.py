"""A norm, a router's product with what it gives, and the choice of experts in one launch, for few rows.

Some programs compute scores, each of some experts; others, one for every row, wait for all scores of theirs and choose.
All norm the rows they take, where that is asked for, and those who choose write down what comes of it.
A score is put into a place that was blank, and whoever has waited for it leaves a blank again: nobody counts, and no
memory has to settle before it is told so. Those who compute wait for nobody, and those who do are too few to keep them
from the GPU; the next kernel is not let in before the last program of this one is.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
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
from phalanx.kernels.gpu.rows import Places, empty_in, norm_and_store, norm_factor, norm_of, warps_of_row
from phalanx.kernels.gpu.stamps import stamp_begin, taken
from phalanx.kernels.unnormed import Unnormed
from phalanx.spec.ffn import Router

MOST_INPUTS = 8192
"""All that a program multiplies by is in its registers before the kernel ahead ends."""

BLANK, NOT_A_NUMBER = tl.constexpr(-1), tl.constexpr(0x7FFFFFFF)

_PLACES = ["correction", "told", "blanks", "weights", "chosen"]
"""As in `route`."""


class Share(NamedTuple):
    """What one program computes: so many scores of so many rows, one after the other, or `tiled` all at once by tensor
    cores: then each warp has a slice of the inputs.
    """

    outputs: int
    rows: int
    tiled: bool = False

    def programs(self, rows: int, outputs: int) -> int:
        return triton.cdiv(outputs, self.outputs) * triton.cdiv(rows, self.rows)


FEW_ROWS, FEW_EXPERTS = 8, 32
"""Up to which tensor cores do not pay."""

SLICES, LONGEST_SLICE = 8, 256
"""Of the inputs: how many there are, and what a warp has registers for."""

TILES = {8: 132, 16: 160}
"""Outputs of tiles of FEW_ROWS rows, and up to how many programs they are the fastest."""


def share_of(rows: int, weight: Tensor) -> Share | None:
    """A small weight is read again for every row, from the GPU's cache; a large one is read once. None where it is
    faster to launch the norm, the product and the choice one after the other.
    """
    outputs, width = weight.shape
    if rows <= FEW_ROWS:
        if weight.nbytes > 2**21:
            return Share(4, 4) if rows > 1 else Share(2, 1)
        return Share(2 if outputs <= 128 else 4, 1)
    if weight.dtype != torch.bfloat16:
        return None
    if outputs <= FEW_EXPERTS:
        return Share(4, 1)
    if width > SLICES * LONGEST_SLICE:
        return Share(8, 1) if rows <= 2 * FEW_ROWS and weight.nbytes <= 2**20 else None
    cuts = ((Share(each, FEW_ROWS, tiled=True), most) for each, most in TILES.items())
    return next((share for share, most in cuts if share.programs(rows, outputs) + rows <= most), None)


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
        _leave(blanks + row * outputs + output, y.to(weight.dtype.element_ty).to(tl.float32), wanted)


@triton.jit
def _score_tile(
    x, residual, norm_weight, weight, blanks, rows, width, outputs, stamp, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    INPUTS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Without a bias and what a row is to be multiplied by, which who chooses knows. x and the residual are multiplied
    apart: added up before, one would wait for the other to come.
    """
    EACH: tl.constexpr = INPUTS // SLICES
    BOTH: tl.constexpr = ROWS if residual is None else 2 * ROWS
    parts = tl.cdiv(outputs, OUTPUTS)
    output = tl.program_id(0) % parts * OUTPUTS + tl.arange(0, OUTPUTS)
    each = tl.arange(0, BOTH)
    row = tl.program_id(0) // parts * ROWS + each % ROWS
    column = tl.arange(0, SLICES)[:, None, None] * EACH + tl.arange(0, EACH)[None, None, :]
    wanted, known, inside = (output < outputs)[None, :, None], (row < rows)[None, :, None], column < width
    block = tl.load(weight + output.to(tl.int64)[None, :, None] * width + column, mask=wanted & inside, other=0.0)
    if norm_weight is not None:
        block *= tl.load(norm_weight + column, mask=inside, other=0.0).to(block.dtype)
    wait_for_ahead()
    place = row[None, :, None] * width + column
    if residual is None:
        place += x
    else:
        place += tl.where(each < ROWS, x, residual)[None, :, None]
    values = tl.load(place, mask=known & inside, other=0.0)
    stamp_begin(stamp)
    y = tl.sum(tl.dot(values, tl.trans(block, 0, 2, 1)), 0)
    if residual is not None:
        y = tl.sum(tl.reshape(y, (2, ROWS, OUTPUTS)), 0)
    row = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    place = blanks + row[:, None] * outputs + output[None, :]
    _leave(place, y, (row[:, None] < rows) & (output < outputs)[None, :])


@triton.jit
def _leave(place, score, mask):
    bits = score.to(tl.int32, bitcast=True)
    tl.store(place, tl.where(bits == BLANK, NOT_A_NUMBER, bits), mask=mask)


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
    INPUTS: tl.constexpr, TILED: tl.constexpr, LARGEST: tl.constexpr, WARPS: tl.constexpr, SCORE: tl.constexpr,
    RENORMALISE: tl.constexpr, JOINED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    let_next_start()
    scoring = tl.cdiv(outputs, OUTPUTS) * tl.cdiv(rows, ROWS)
    if tl.program_id(0) < scoring and TILED:
        _score_tile(
            x, residual, norm_weight, weight, blanks, rows, width, outputs, stamp, OUTPUTS, ROWS, INPUTS, WARPS
        )  # fmt: skip
    elif tl.program_id(0) < scoring:
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
        biases = tl.zeros(expert.shape, tl.float32)
        if TILED and bias is not None:
            biases = tl.load(bias + expert, mask=known, other=0.0).to(tl.float32)
        wait_for_ahead()
        factor = 1.0
        if norm_weight is not None:
            h = _taken(x, residual, row, width, column, column < width)
            tl.store(kept + row * width + column, h, mask=column < width)
            norm_and_store(h, scale, out, out_fp8, out_scales, row, rows, width, eps, INPUTS, LARGEST)
            if TILED:
                factor = norm_factor(h, width, eps)
        slot = tl.broadcast_to(tl.arange(0, SLOTS)[None, None, :], (WARPS, 1, SLOTS))
        value, gate = _awaited(blanks + row * outputs, expert, slot, experts, TOP, GATED)
        if TILED:
            value = (value * factor + biases).to(weight.dtype.element_ty).to(tl.float32)
            gate = (gate * factor).to(weight.dtype.element_ty).to(tl.float32)
        opening = None
        if GATED:
            opening = gate
        choose_and_store(
            value, expert, added, told, opening, weights, chosen, row, experts, scaling, weight.dtype.element_ty,
            SCORE, RENORMALISE, JOINED, GROUPS, KEPT, TOP, SLOTS, BLOCK, WIDTH, WARPS,
        )  # fmt: skip


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    share, inputs = share_of(rows, weight), max(GROUP, triton.next_power_of_2(width))
    assert share is not None
    warps = SLICES if share.tiled else warps_of_row(width)
    way = way_to_choose(router, correction, told, joined)
    if way["GROUPS"] == 1:
        way |= {"BLOCK": max(LANES, way["BLOCK"]), "WIDTH": LANES}
    _score_and_route[(share.programs(rows, outputs) + rows,)](
        given.contiguous(), residual, kept, norm_weight, *places, weight, bias, blanks, correction, told, weights,
        chosen, rows, width, eps, outputs, router.experts, router.scaling, stamp, GATED=outputs > router.experts,
        OUTPUTS=share.outputs, ROWS=share.rows, INPUTS=inputs, TILED=share.tiled,
        LARGEST=LARGEST, WARPS=warps, **way, num_warps=warps, launch_pdl=starts_early(),
    )  # fmt: skip
    return normed, weights, chosen
