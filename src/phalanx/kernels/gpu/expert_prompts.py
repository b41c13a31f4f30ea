"""Products of experts of many tokens, for Hopper, by programs that stay: some warps copy, two groups multiply.

The first product gates what it computes, and in FP8 brings it to that, a row for every place in the order of experts,
from which the second one takes it. Tiles are as large as registers hold: what the second cache gives a multiprocessor
is the limit, and of a larger tile each number that is read is multiplied more often.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from phalanx.kernels.fp8 import GROUP, LARGEST, Fp8Weight, Quantised
from phalanx.kernels.gpu.four_bit_persistent import GROUP_THREADS, REGISTERS, used_tiles
from phalanx.kernels.gpu.rows import empty_quantised, gated_product
from phalanx.kernels.gpu.stream import copy_in, multiprocessors, tiles_of
from phalanx.spec.ffn import Activation

ROWS = 128
"""Of a tile, which has twice as many outputs as share a scale. A group of warps has half of the rows."""

STEP_BYTES = 128
"""Of a row that are copied at once."""

STAGES = 4
"""Copies in flight."""

GROUPS_OF_WARPS = 3

LAUNCHED = REGISTERS // (GROUP_THREADS * GROUPS_OF_WARPS) // 8 * 8
"""Registers of a thread, before those that multiply take some of those that copy."""

GATHERING, COPYING = 72, 40
"""What is left to these, of the first product and of the second. With other numbers the compiler keeps more at once
than there is room for."""

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

_ROWS, _GROUP, _LARGEST = gl.constexpr(ROWS), gl.constexpr(GROUP), gl.constexpr(LARGEST)
_PART, _STEP_BYTES = gl.constexpr(ROWS // 2), gl.constexpr(STEP_BYTES)
_TOGETHER = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
"""Of what leaves: a thread has eight columns that lie together."""

_gated_product = gluon.jit(gated_product.fn)


class _Switches(NamedTuple):
    """What kernels are built for, of which all warps of a program know."""

    entering: bool
    stages: int
    kind: str
    limit: float | None
    dtype: Any
    weighed: bool
    step: int


@gluon.constexpr_function
def _switches(*values: Any) -> _Switches:
    return _Switches(*values)


@gluon.jit
def _matrix_rows(expert, out_tile, outputs, ENTERING: gl.constexpr):
    """Where the two matrices of a tile begin: gates and what they gate, or outputs that lie together."""
    first = expert * outputs
    if ENTERING:
        return first + out_tile * _GROUP, first + outputs // 2 + out_tile * _GROUP
    return first + out_tile * 2 * _GROUP, first + (out_tile * 2 + 1) * _GROUP


@gluon.jit
def _copy_weights(weights, left_row, right_row, column, full, stage):
    copy_in(weights, [left_row, column], full, stage.slice(0, _GROUP, 0))
    copy_in(weights, [right_row, column], full, stage.slice(_GROUP, _GROUP, 0))


@gluon.jit
def _copy(weights, xs, owner, stages, span, outputs, SWITCHES: gl.constexpr):
    """The warp that copies what the first product left, which lies together."""
    STAGES: gl.constexpr = SWITCHES.stages
    STEP: gl.constexpr = SWITCHES.step
    x_stages, weight_stages, filled, free = stages
    tiles, out_tiles, steps = span
    number = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile = tile // out_tiles
        left_row, right_row = _matrix_rows(gl.load(owner + row_tile), tile % out_tiles, outputs, False)
        for step in range(steps):
            here = number % STAGES
            full = filled.index(here)
            mbarrier.wait(free.index(here), (number // STAGES & 1) ^ 1)
            mbarrier.expect(full, (_ROWS + 2 * _GROUP) * _STEP_BYTES)
            _copy_weights(weights, left_row, right_row, step * STEP, full, weight_stages.index(here))
            copy_in(xs, [row_tile * _ROWS, step * STEP], full, x_stages.index(here))
            number += 1


@gluon.jit
def _gather(weights, x, order, owner, stages, span, outputs, inputs, pairs, pairs_a_row, SWITCHES: gl.constexpr):
    """The warps that copy weights, and rows of x that lie anywhere."""
    STAGES: gl.constexpr = SWITCHES.stages
    STEP: gl.constexpr = SWITCHES.step
    apart: gl.constexpr = gl.BlockedLayout([1, STEP // 8], [4, 8], [4, 1], [1, 0])
    x_stages, weight_stages, filled, free = stages
    tiles, out_tiles, steps = span
    column = gl.arange(0, STEP, gl.SliceLayout(0, apart))
    place = gl.arange(0, _ROWS, gl.SliceLayout(1, apart))
    number = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile = tile // out_tiles
        left_row, right_row = _matrix_rows(gl.load(owner + row_tile), tile % out_tiles, outputs, True)
        taken = gl.load(order + row_tile * _ROWS + place)
        x_row = x + (taken // pairs_a_row).to(gl.int64)[:, None] * inputs + column[None, :]
        is_known = (taken < pairs)[:, None]
        for step in range(steps):
            here = number % STAGES
            full = filled.index(here)
            mbarrier.wait(free.index(here), (number // STAGES & 1) ^ 1)
            mbarrier.expect(full, 2 * _GROUP * _STEP_BYTES)
            _copy_weights(weights, left_row, right_row, step * STEP, full, weight_stages.index(here))
            mask = is_known & (step * STEP + column < inputs)[None, :]
            async_copy.async_copy_global_to_shared(x_stages.index(here), x_row + step * STEP, mask=mask)
            async_copy.mbarrier_arrive(full, increment_count=False)
            number += 1


@gluon.jit
def _leave(acc, pair, out, pairs, first, outputs):
    """Half of a tile's outputs to the rows of their pairs."""
    values = gl.convert_layout(acc.to(out.dtype.element_ty), _TOGETHER)
    column = first + gl.arange(0, _GROUP, gl.SliceLayout(0, _TOGETHER))
    inside = (pair < pairs)[:, None] & (column < outputs)[None, :]
    gl.store(out + pair.to(gl.int64)[:, None] * outputs + column[None, :], values, mask=inside)


@gluon.jit
def _enter(
    left, right, inner, inner_scales, first_place, places, out_tile, width, SWITCHES: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """A group of what comes between the products."""
    KIND: gl.constexpr = SWITCHES.kind
    LIMIT: gl.constexpr = SWITCHES.limit
    DTYPE: gl.constexpr = SWITCHES.dtype
    together: gl.constexpr = gl.BlockedLayout([1, SWITCHES.step // 8], [4, 8], [4, 1], [1, 0])
    found = _gated_product(left.to(DTYPE), right.to(DTYPE), KIND, LIMIT)
    if inner_scales is not None:
        found = found.to(gl.float32)
        scale = gl.maximum(gl.max(gl.abs(found), 1), 1e-10) / _LARGEST
        place = first_place + gl.arange(0, _PART, gl.SliceLayout(1, LAYOUT))
        gl.store(inner_scales + out_tile.to(gl.int64) * places + place, scale)
        found = found / scale[:, None]
    values = gl.convert_layout(found.to(inner.dtype.element_ty), together)
    row = first_place + gl.arange(0, _PART, gl.SliceLayout(1, together))
    column = out_tile * _GROUP + gl.arange(0, _GROUP, gl.SliceLayout(0, together))
    gl.store(inner + row.to(gl.int64)[:, None] * width + column[None, :], values, mask=(column < width)[None, :])


@gluon.jit
def _scales_of(weight_scales, expert, out_tile, out_tiles, scale_rows, steps, ENTERING: gl.constexpr):
    """Where those of a tile's two matrices lie, step by step."""
    left_block = out_tile if ENTERING else 2 * out_tile
    right_block = out_tiles + out_tile if ENTERING else gl.minimum(2 * out_tile + 1, scale_rows - 1)
    first = weight_scales + expert * scale_rows * steps
    return first + left_block * steps, first + right_block * steps


@gluon.jit
def _consume(scales, order, owner, results, stages, span, sizes, PART: gl.constexpr, SWITCHES: gl.constexpr):
    """The warps of half of each tile's rows. What a tile needs is asked for before the one ahead of it ends."""
    STAGES: gl.constexpr = SWITCHES.stages
    ENTERING: gl.constexpr = SWITCHES.entering
    WEIGHED: gl.constexpr = SWITCHES.weighed
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _GROUP, SWITCHES.step // 4])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    x_stages, weight_stages, filled, free = stages
    tiles, out_tiles, steps = span
    x_scales, weight_scales, pair_weights = scales
    out, inner, inner_scales, places = results
    outputs, x_rows, pairs, pairs_a_row, scale_rows = sizes
    FP8: gl.constexpr = weight_scales is not None
    none = gl.zeros([_PART, _GROUP], gl.float32, layout)
    across = PART * _PART + gl.arange(0, _PART, by_row)
    number = 0
    if FP8:
        tile = gl.minimum(gl.program_id(0), tiles - 1)
        row_tile, out_tile = tile // out_tiles, tile % out_tiles
        expert, scaled = gl.load(owner + row_tile), row_tile * _ROWS + across
        if ENTERING:
            scaled = gl.minimum(gl.load(order + scaled) // pairs_a_row, x_rows - 1)
        left_scales, right_scales = _scales_of(weight_scales, expert, out_tile, out_tiles, scale_rows, steps, ENTERING)
        left_scale, right_scale, row_scale = gl.load(left_scales), gl.load(right_scales), gl.load(x_scales + scaled)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, out_tile = tile // out_tiles, tile % out_tiles
        first_place = row_tile * _ROWS + PART * _PART
        if FP8:
            following = gl.minimum(tile + gl.num_programs(0), tiles - 1)
            next_expert = gl.load(owner + following // out_tiles)
            next_scaled = following // out_tiles * _ROWS + across
            if ENTERING:
                next_scaled = gl.minimum(gl.load(order + next_scaled) // pairs_a_row, x_rows - 1)
        if not ENTERING:
            pair = gl.load(order + first_place + gl.arange(0, _PART, gl.SliceLayout(1, _TOGETHER)))
            if WEIGHED:
                weighed = gl.load(order + first_place + gl.arange(0, _PART, by_row))
                weight_of = gl.load(pair_weights + weighed, mask=weighed < pairs, other=0.0)
        left_acc = gl.zeros([_PART, _GROUP], gl.float32, layout)
        right_acc = gl.zeros([_PART, _GROUP], gl.float32, layout)
        for step in range(steps):
            if FP8:
                more = gl.minimum(step + 1, steps - 1)
                next_left, next_right = gl.load(left_scales + more), gl.load(right_scales + more)
                next_row = gl.load(x_scales + more.to(gl.int64) * x_rows + scaled)
            here = number % STAGES
            mbarrier.wait(filled.index(here), number // STAGES & 1)
            if ENTERING:
                fence_async_shared()
            x, weight = x_stages.index(here).slice(PART * _PART, _PART, 0), weight_stages.index(here)
            left = weight.slice(0, _GROUP, 0).permute((1, 0))
            right = weight.slice(_GROUP, _GROUP, 0).permute((1, 0))
            if FP8:
                found = warpgroup_mma(x, left, none, use_acc=False, is_async=True)
                found = warpgroup_mma_wait(0, [found])
                left_acc += found * (row_scale * left_scale)[:, None]
                found = warpgroup_mma(x, right, none, use_acc=False, is_async=True)
                found = warpgroup_mma_wait(0, [found])
                mbarrier.arrive(free.index(here))
                right_acc += found * (row_scale * right_scale)[:, None]
                left_scale, right_scale, row_scale = next_left, next_right, next_row
            else:
                left_acc = warpgroup_mma(x, left, left_acc, is_async=True)
                right_acc = warpgroup_mma(x, right, right_acc, is_async=True)
                left_acc = warpgroup_mma_wait(1, [left_acc])
                right_acc = warpgroup_mma_wait(0, [right_acc])
                mbarrier.arrive(free.index(here))
            number += 1
        if FP8:
            expert, scaled = next_expert, next_scaled
            left_scales, right_scales = _scales_of(
                weight_scales, expert, following % out_tiles, out_tiles, scale_rows, steps, ENTERING
            )
            left_scale, right_scale, row_scale = gl.load(left_scales), gl.load(right_scales), gl.load(x_scales + scaled)
        if ENTERING:
            width = outputs // 2
            _enter(left_acc, right_acc, inner, inner_scales, first_place, places, out_tile, width, SWITCHES, layout)
        else:
            first = out_tile * 2 * _GROUP
            if WEIGHED:
                left_acc *= weight_of[:, None]
                right_acc *= weight_of[:, None]
            _leave(left_acc, pair, out, pairs, first, outputs)
            _leave(right_acc, pair, out, pairs, first + _GROUP, outputs)


@gluon.jit(do_not_specialize=["pairs", "x_rows", "row_tiles"])
def stay_experts(
    weights, x, weight_scales, x_scales, order, owner, pair_weights, out, inner, inner_scales, pairs, x_rows, row_tiles,
    pairs_a_row, outputs, inputs, scale_rows, ENTERING: gl.constexpr, KIND: gl.constexpr, LIMIT: gl.constexpr,
    DTYPE: gl.constexpr, WEIGHED: gl.constexpr, STAGES: gl.constexpr, TAKEN: gl.constexpr, COPYING: gl.constexpr,
):  # fmt: skip
    """With ENTERING, inner[place] = gate and product of x[order[place] // pairs_a_row]. Otherwise, of x by places,
    out[order[place]] = x @ weight.T, or times its weight.
    """
    GATHERERS: gl.constexpr = 4 if ENTERING else 0
    STEP: gl.constexpr = weights.block_shape[1]
    weight_stages = gl.allocate_shared_memory(weights.dtype, [STAGES, 2 * _GROUP, STEP], weights.layout)
    x_stages = gl.allocate_shared_memory(weights.dtype, [STAGES, _ROWS, STEP], weights.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1 + 32 * GATHERERS)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    places = row_tiles * _ROWS
    out_tiles = gl.cdiv(outputs // 2, _GROUP) if ENTERING else gl.cdiv(outputs, 2 * _GROUP)
    tiles = used_tiles(owner, row_tiles) * out_tiles
    span = (tiles, out_tiles, gl.cdiv(inputs, STEP))
    stages = (x_stages, weight_stages, filled, free)
    results = (out, inner, inner_scales, places)
    sizes = (outputs, x_rows, pairs, pairs_a_row, scale_rows)
    SWITCHES: gl.constexpr = _switches(ENTERING, STAGES, KIND, LIMIT, DTYPE, WEIGHED, STEP)
    scales = (x_scales, weight_scales, pair_weights)
    if ENTERING:
        gl.warp_specialize(
            (
                (_consume, (scales, order, owner, results, stages, span, sizes, 0, SWITCHES)),
                (_consume, (scales, order, owner, results, stages, span, sizes, 1, SWITCHES)),
                (_gather, (weights, x, order, owner, stages, span, outputs, inputs, pairs, pairs_a_row, SWITCHES)),
            ),
            (4, 4),
            (TAKEN, COPYING),
        )
    else:
        gl.warp_specialize(
            (
                (_consume, (scales, order, owner, results, stages, span, sizes, 0, SWITCHES)),
                (_consume, (scales, order, owner, results, stages, span, sizes, 1, SWITCHES)),
                (_copy, (weights, x, owner, stages, span, outputs, SWITCHES)),
            ),
            (4, 1),
            (TAKEN, COPYING),
        )


def taken(copying: int) -> int:
    """Registers of a thread that multiplies, if those that copy keep so many."""
    return (LAUNCHED * GROUPS_OF_WARPS - copying) // 2 // 8 * 8


def multiplies(weight: Tensor | Fp8Weight) -> bool:
    """Of those that can be streamed, all but FP8 with a scale for fewer outputs."""
    return isinstance(weight, Tensor) or weight.row_block == GROUP


def product(
    x: Tensor | Quantised, gate_up: Tensor | Fp8Weight, down: Tensor | Fp8Weight, order: Tensor, owner: Tensor,
    pairs_a_row: int, pair_weights: Tensor | None, out: Tensor, activation: Activation,
) -> None:  # fmt: skip
    """out[pair] = down(gate(x) * up(x)), x of row pair // pairs_a_row, or times its weight."""
    places, width = len(owner) * ROWS, down.shape[2]
    in_fp8 = isinstance(x, Quantised)
    inner = empty_quantised(places, width, out.device) if in_fp8 else out.new_empty(places, width)
    fixed = {"KIND": activation.kind, "LIMIT": activation.limit, "DTYPE": DTYPES[out.dtype], "STAGES": STAGES}
    for entering, weight, given in ((True, gate_up, x), (False, down, inner)):
        matrices, scales = (weight.values, weight.scales) if isinstance(weight, Fp8Weight) else (weight, None)
        (values, x_scales), (kept, kept_scales) = _parts(given), _parts(inner)
        step, copying = STEP_BYTES // values.itemsize, GATHERING if entering else COPYING
        _, outputs, inputs = matrices.shape
        stay_experts[(multiprocessors(out.device),)](
            tiles_of(matrices.flatten(0, 1), GROUP, step),
            values.contiguous() if entering else tiles_of(values, ROWS, step), scales, x_scales, order, owner,
            pair_weights, out, kept, kept_scales, len(out), len(values), len(owner), pairs_a_row, outputs, inputs,
            0 if scales is None else scales.shape[1], ENTERING=entering, WEIGHED=pair_weights is not None,
            TAKEN=taken(copying), COPYING=copying, num_warps=4, maxnreg=LAUNCHED, launch_pdl=True, **fixed,
        )  # fmt: skip


def _parts(given: Tensor | Quantised) -> tuple[Tensor, Tensor | None]:
    return given if isinstance(given, Quantised) else (given, None)
