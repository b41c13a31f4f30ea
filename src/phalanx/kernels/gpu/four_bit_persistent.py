"""Products with weights of four bits by programs that stay: some warps only copy, others widen and multiply.

A program's share is a run of steps over all tiles, whichever these are of, so that all end together; the next tile is
on its way while one ends. Groups of four warps have 64 outputs each and share what is copied of x. See
`four_bit_stream` for the weights, which stream and are widened as there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from phalanx.kernels.four_bit import STEP, FourBitWeight
from phalanx.kernels.gpu.four_bit_numbers import UNFOLD
from phalanx.kernels.gpu.four_bit_stream import SCALE_KINDS, bytes_of
from phalanx.kernels.gpu.four_bit_widening import dealt_rows, of_half, tile_of, widened
from phalanx.kernels.gpu.stream import (
    SHARED_BYTES,
    SYSTEM_BYTES,
    all_threads,
    copied_at_once,
    copied_rows,
    copy_in,
    copy_rows,
    multiprocessors,
)

HEIGHT = 64
"""Outputs of a group of warps."""

MOST_STAGES, LEAST_STEPS = 8, 4
"""Copies in flight at most, and steps of a program at least."""

REGISTERS, MOST_REGISTERS, GROUP_THREADS = 65536, 240, 128
"""Of a multiprocessor, of a thread at most, and threads that a group of warps has."""

COPYING, GATHERING = 24, {8: 64, 32: 96, 64: 104}
"""Registers of a thread that copies, and where it has rows of x that lie anywhere, by the rows of a tile."""

FEW_ROWS = 16
"""Of a tile, up to which warps multiply on their own (mma.sync), and more programs find room."""

_STEP, _UNITS, _HEIGHT = gl.constexpr(STEP), gl.constexpr(STEP // 4), gl.constexpr(HEIGHT)
_UNFOLD = gl.constexpr(UNFOLD)
_OWNERS, _MOST_SUMS, _FEW_ROWS = gl.constexpr(512), gl.constexpr(32), gl.constexpr(FEW_ROWS)


class _Switches(NamedTuple):
    """What kernels are built for, of which all warps of a program know."""

    parts: int
    stages: int
    grouped: bool
    gatherers: int
    zeros: bool
    steps_a_group: int
    e2m1: bool
    each: int
    scale: Any
    has_bias: bool
    weighed: bool
    copied: int


@gluon.constexpr_function
def _switches(*values: Any) -> _Switches:
    return _Switches(*values)


@gluon.jit
def _copy(values, xs, scales, zeros, owner, stages, span, rows, outputs, SWITCHES: gl.constexpr):
    """The warp that copies weights, the first while the kernel ahead ends, and x where its rows lie together."""
    PARTS: gl.constexpr = SWITCHES.parts
    STAGES: gl.constexpr = SWITCHES.stages
    GROUPED: gl.constexpr = SWITCHES.grouped
    ZEROS: gl.constexpr = SWITCHES.zeros
    STEPS_A_GROUP: gl.constexpr = SWITCHES.steps_a_group
    weight_stages, scale_stages, zero_stages, x_stages, filled, free = stages
    begin, end, steps, row_tiles, _ = span
    OF_ZEROS: gl.constexpr = zeros.block_shape[1] if ZEROS else 0
    ROWS: gl.constexpr = x_stages.shape[1]
    X_BYTES: gl.constexpr = 0 if GROUPED else ROWS * _STEP * 2
    BYTES: gl.constexpr = PARTS * (_HEIGHT * _STEP // 2 + 4 * scales.block_shape[1] + 4 * OF_ZEROS) + X_BYTES
    for early in gl.static_range(1 if GROUPED else 2):
        start = begin
        last = end if GROUPED or early == 1 else gl.minimum(end, begin + STAGES)
        while start < last:
            tile = start // steps
            stop = gl.minimum(last, (tile + 1) * steps)
            row_tile, out_tile = tile % row_tiles, tile // row_tiles
            expert = gl.load(owner + row_tile) if GROUPED else 0
            for at in range(start, stop):
                number, step = at - begin, at - tile * steps
                here = number % STAGES
                full = filled.index(here)
                mbarrier.wait(free.index(here), (number // STAGES & 1) ^ 1)
                more = True if GROUPED or early == 0 else number >= STAGES
                mbarrier.expect(full, BYTES, pred=more)
                scale_row = expert * gl.cdiv(steps, STEPS_A_GROUP) + step // STEPS_A_GROUP
                for part in gl.static_range(PARTS):
                    block, stage = out_tile * PARTS + part, here * PARTS + part
                    weight_at = [expert * outputs + block * _HEIGHT, step * _UNITS]
                    copy_in(values, weight_at, full, weight_stages.index(stage), pred=more)
                    scale_at = [scale_row, block * scales.block_shape[1]]
                    copy_in(scales, scale_at, full, scale_stages.index(stage), pred=more)
                    if ZEROS:
                        zero_at = [scale_row, block * zeros.block_shape[1]]
                        copy_in(zeros, zero_at, full, zero_stages.index(stage), pred=more)
                if (not GROUPED) and early == 1:
                    copy_rows(xs, row_tile * ROWS, rows, step * _STEP, full, x_stages.index(here))
            start = stop
        if (not GROUPED) and early == 0:
            cuda.gdc_wait()


@gluon.jit
def _gather(xs, order, stages, span, rows, pairs_a_row, inputs, SWITCHES: gl.constexpr):
    """The warps that copy rows of x which lie anywhere."""
    _weight_stages, _scale_stages, _zero_stages, x_stages, filled, free = stages
    begin, end, steps, row_tiles, _ = span
    ROWS: gl.constexpr = x_stages.shape[1]
    STAGES: gl.constexpr = SWITCHES.stages
    WARPS: gl.constexpr = SWITCHES.gatherers
    cuda.gdc_wait()
    apart: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    column = gl.arange(0, _STEP, gl.SliceLayout(0, apart))
    slot = gl.arange(0, ROWS, gl.SliceLayout(1, apart))
    start = begin
    while start < end:
        tile = start // steps
        stop = gl.minimum(end, (tile + 1) * steps)
        taken = gl.load(order + tile % row_tiles * ROWS + slot)
        x_row = xs + (taken // pairs_a_row).to(gl.int64)[:, None] * inputs + column[None, :]
        is_known = (taken < rows)[:, None]
        for at in range(start, stop):
            number, first = at - begin, (at - tile * steps) * _STEP
            here = number % STAGES
            mbarrier.wait(free.index(here), (number // STAGES & 1) ^ 1)
            mask = is_known & (first + column < inputs)[None, :]
            async_copy.async_copy_global_to_shared(x_stages.index(here), x_row + first, mask=mask)
            async_copy.mbarrier_arrive(filled.index(here), increment_count=False)
        start = stop


@gluon.jit
def _consume(
    bias, order, owner, pair_weights, stages, span, results, PART: gl.constexpr, SWITCHES: gl.constexpr
):  # fmt: skip
    """The warps of 64 outputs of each tile. Tiles that several programs have a part of are added up by the last."""
    PARTS: gl.constexpr = SWITCHES.parts
    STAGES: gl.constexpr = SWITCHES.stages
    GROUPED: gl.constexpr = SWITCHES.grouped
    ZEROS: gl.constexpr = SWITCHES.zeros
    E2M1: gl.constexpr = SWITCHES.e2m1
    EACH: gl.constexpr = SWITCHES.each
    SCALE: gl.constexpr = SWITCHES.scale
    HAS_BIAS: gl.constexpr = SWITCHES.has_bias
    WEIGHED: gl.constexpr = SWITCHES.weighed
    weight_stages, scale_stages, zero_stages, x_stages, filled, free = stages
    begin, end, steps, row_tiles, share = span
    out, partial, counter, rows, outputs = results
    dtype: gl.constexpr = x_stages.dtype
    ROWS: gl.constexpr = x_stages.shape[1]
    FEW: gl.constexpr = ROWS <= _FEW_ROWS
    SUMS: gl.constexpr = (not FEW) and (not E2M1) and EACH <= 2 and ROWS <= _MOST_SUMS
    by_warps: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    layout: gl.constexpr = by_warps if FEW else gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    x_operand: gl.constexpr = gl.DotOperandLayout(1, by_warps, 2)
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    by_output: gl.constexpr = gl.SliceLayout(1, layout)
    of_rows: gl.constexpr = dealt_rows(4)
    HALF: gl.constexpr = _STEP // 2
    cuda.gdc_wait()
    inner, across = gl.arange(0, _HEIGHT, by_output), gl.arange(0, ROWS, by_row)
    start = begin
    while start < end:
        tile = start // steps
        stop = gl.minimum(end, (tile + 1) * steps)
        row_tile = tile % row_tiles
        output = (tile // row_tiles * PARTS + PART) * _HEIGHT + inner
        expert = 0
        if GROUPED:
            row = gl.load(order + row_tile * ROWS + across)
            expert = gl.load(owner + row_tile)
        else:
            row = copied_rows(row_tile * ROWS, rows, across, ROWS, SWITCHES.copied)
        acc = gl.zeros([_HEIGHT, ROWS], gl.float32, layout)
        for at in range(start, stop):
            number = at - begin
            here = number % STAGES
            mbarrier.wait(filled.index(here), number // STAGES & 1)
            if GROUPED and not FEW:
                fence_async_shared()
            mine = here * PARTS + PART
            weight, x = weight_stages.index(mine), x_stages.index(here)
            scale_tile = tile_of(scale_stages.index(mine), SCALE, _HEIGHT, EACH)
            zero_tile = tile_of(zero_stages.index(mine), gl.uint8, _HEIGHT, EACH) if ZEROS else scale_tile
            left_x, right_x = x.slice(0, HALF, 1).permute((1, 0)), x.slice(HALF, HALF, 1).permute((1, 0))
            left = widened(weight, scale_tile, zero_tile, dtype, E2M1, ZEROS, SUMS, _HEIGHT, EACH, 0, 4, operand)
            if FEW:
                right = widened(weight, scale_tile, zero_tile, dtype, E2M1, ZEROS, SUMS, _HEIGHT, EACH, 1, 4, operand)
                left_x, right_x = left_x.load(x_operand), right_x.load(x_operand)
                mbarrier.arrive(free.index(here))
                acc = mma_v2(right, right_x, mma_v2(left, left_x, acc))
            elif SUMS:
                none = gl.zeros([_HEIGHT, ROWS], gl.float32, layout)
                left_sum = warpgroup_mma(left, left_x, none, use_acc=False, is_async=True)
                right = widened(weight, scale_tile, zero_tile, dtype, E2M1, ZEROS, SUMS, _HEIGHT, EACH, 1, 4, operand)
                right_sum = warpgroup_mma(right, right_x, none, use_acc=False, is_async=True)
                left_scale = of_half(scale_tile, 0, EACH).load(of_rows).to(gl.float32).reshape([_HEIGHT])
                right_scale = of_half(scale_tile, 1, EACH).load(of_rows).to(gl.float32).reshape([_HEIGHT])
                left_sum = warpgroup_mma_wait(1, [left_sum])
                acc += left_sum * gl.convert_layout(left_scale, by_output, assert_trivial=True)[:, None]
                right_sum = warpgroup_mma_wait(0, [right_sum])
                mbarrier.arrive(free.index(here))
                acc += right_sum * gl.convert_layout(right_scale, by_output, assert_trivial=True)[:, None]
            else:
                acc = warpgroup_mma(left, left_x, acc, is_async=True)
                right = widened(weight, scale_tile, zero_tile, dtype, E2M1, ZEROS, SUMS, _HEIGHT, EACH, 1, 4, operand)
                acc = warpgroup_mma(right, right_x, acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(free.index(here))
        if E2M1:
            acc *= _UNFOLD
        last = True
        if stop - start < steps:
            first_program, last_program = tile * steps // share, ((tile + 1) * steps - 1) // share
            parts = partial + PART * (_HEIGHT * ROWS) + inner[:, None] * ROWS + across[None, :]
            ours = gl.program_id(0) * 2 + (start == tile * steps).to(gl.int32)
            gl.store(parts + ours.to(gl.int64) * (PARTS * _HEIGHT * ROWS), acc)
            all_threads()
            arrived = counter + first_program * PARTS + PART
            last = gl.atomic_add(arrived, 1, sem="acq_rel") == last_program - first_program
            if last:
                acc = gl.zeros([_HEIGHT, ROWS], gl.float32, layout)
                for program in range(first_program, last_program + 1):
                    theirs = program * 2 + (program * share <= tile * steps).to(gl.int32)
                    acc += gl.load(parts + theirs.to(gl.int64) * (PARTS * _HEIGHT * ROWS), cache_modifier=".cg")
                gl.store(arrived, 0)
        if last:
            if HAS_BIAS:
                of_output = gl.load(bias + expert * outputs + output, mask=output < outputs, other=0.0)
                acc += of_output.to(gl.float32)[:, None]
            if WEIGHED:
                acc *= gl.load(pair_weights + row, mask=row < rows, other=0.0)[None, :]
            inside = (output[:, None] < outputs) & (row[None, :] < rows)
            place = out + row[None, :].to(gl.int64) * outputs + output[:, None]
            gl.store(place, acc.to(out.dtype.element_ty), mask=inside)
        start = stop


@gluon.jit
def used_tiles(owner, owners):
    """How many tiles of rows there are: those of experts come first."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    found = 0
    for first in range(0, owners, _OWNERS):
        at = first + gl.arange(0, _OWNERS, LAYOUT)
        found += gl.sum((gl.load(owner + at, mask=at < owners, other=-1) >= 0).to(gl.int32), 0)
    return found


@gluon.jit(do_not_specialize=["rows", "row_tiles"])
def stay_four_bit(
    values, xs, scales, zeros, bias, out, partial, counter, order, owner, pair_weights, rows, row_tiles, pairs_a_row,
    outputs, inputs, E2M1: gl.constexpr, ZEROS: gl.constexpr, EACH: gl.constexpr, SCALE: gl.constexpr,
    STEPS_A_GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, GROUPED: gl.constexpr, PLACED: gl.constexpr,
    WEIGHED: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, LEAST: gl.constexpr,
    TAKEN: gl.constexpr, COPYING: gl.constexpr,
):  # fmt: skip
    """x @ weight.T + bias; where GROUPED, of all experts, whose rows of x lie anywhere, in tiles of `order`, which with
    PLACED was there before the kernel ahead began.

    Scales of few groups and rows multiply sums, others the weights.
    """
    GATHERERS: gl.constexpr = 2 if GROUPED else 0
    dtype: gl.constexpr = xs.dtype.element_ty if GROUPED else xs.dtype
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if not GROUPED:
        cuda.gdc_launch_dependents()
    weight_stages = gl.allocate_shared_memory(values.dtype, [STAGES * PARTS, _HEIGHT, _UNITS], values.layout)
    scale_stages = gl.allocate_shared_memory(scales.dtype, [STAGES * PARTS, 1, scales.block_shape[1]], scales.layout)
    if ZEROS:
        zero_stages = gl.allocate_shared_memory(zeros.dtype, [STAGES * PARTS, 1, zeros.block_shape[1]], zeros.layout)
    else:
        zero_stages = scale_stages
    x_stages = gl.allocate_shared_memory(dtype, [STAGES, ROWS, _STEP], X_LAYOUT)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1 + 32 * GATHERERS)
        mbarrier.init(free.index(i), count=PARTS)
    fence_async_shared()
    if GROUPED:
        if not PLACED:
            cuda.gdc_wait()
        cuda.gdc_launch_dependents()
        row_tiles = used_tiles(owner, row_tiles)
    steps = gl.cdiv(inputs, _STEP)
    units = gl.cdiv(outputs, PARTS * _HEIGHT) * row_tiles * steps
    share = gl.maximum(gl.cdiv(units, gl.num_programs(0)), LEAST)
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, units)
    stages = (weight_stages, scale_stages, zero_stages, x_stages, filled, free)
    span = (begin, end, steps, row_tiles, share)
    results = (out, partial, counter, rows, outputs)
    SWITCHES: gl.constexpr = _switches(
        PARTS, STAGES, GROUPED, GATHERERS, ZEROS, STEPS_A_GROUP, E2M1, EACH, SCALE, HAS_BIAS, WEIGHED,
        ROWS if GROUPED else xs.block_shape[0],
    )  # fmt: skip
    FIRST: gl.constexpr = 3 - PARTS
    WORKERS: gl.constexpr = 4 if GROUPED else 3
    gl.warp_specialize(
        (
            (_consume, (bias, order, owner, pair_weights, stages, span, results, 2, SWITCHES)),
            (_consume, (bias, order, owner, pair_weights, stages, span, results, 1, SWITCHES)),
            (_consume, (bias, order, owner, pair_weights, stages, span, results, 0, SWITCHES)),
            (_copy, (values, xs, scales, zeros, owner, stages, span, rows, outputs, SWITCHES)),
            (_gather, (xs, order, stages, span, rows, pairs_a_row, inputs, SWITCHES)),
        )[FIRST : WORKERS + 1],
        (4, 4, 1, GATHERERS)[FIRST:WORKERS],
        (TAKEN, TAKEN, COPYING, COPYING)[FIRST:WORKERS],
    )  # fmt: skip


class Stay(NamedTuple):
    """How programs that stay are cut: rows of a tile, two or three groups of 64 outputs, and how many programs a
    multiprocessor has.
    """

    rows: int
    parts: int
    together: int = 1

    def stages(self, of_weights: int) -> int:
        """Copies in flight, where a row of a step has so many bytes with its scales."""
        stage = self.parts * HEIGHT * of_weights + self.rows * STEP * 2
        return min(MOST_STAGES, (SHARED_BYTES // self.together - 2 * SYSTEM_BYTES) // stage)

    @property
    def registers(self) -> int:
        """Of a thread, before those that multiply take some of those that copy, which are one group of warps more."""
        return REGISTERS // (GROUP_THREADS * (self.parts + 1) * self.together) // 8 * 8

    def taken(self, copying: int) -> int:
        """What threads that multiply have, if those that copy keep so many."""
        return min(MOST_REGISTERS, (self.registers * (self.parts + 1) - copying) // self.parts // 8 * 8)


GROUPED_WAYS = {8: Stay(8, 2, 2), 32: Stay(32, 3), 64: Stay(64, 3)}
WAYS = {32: Stay(32, 3), 64: Stay(64, 3), 128: Stay(128, 2)}
"""By the rows of a tile, of experts and of one matrix. Of fewer rows, many programs of few warps hide each other's
waiting better, but where experts have many tiles.
"""

MANY_TILES = 160
"""Of experts in MXFP4, as many as 64 tokens have of 128: fewer are no faster so, and others were not timed."""

LEAST_ROWS = {28672: 17, 10240: 33}
LEAST_ROWS_OF_LONG, LONG = 65, 8192
"""Of x, by the outputs of one matrix, and where outputs and inputs are so many: smaller products are over before it
pays to have programs stay. It pays most where tiles lack rows.
"""


def experts_stay(weight: FourBitWeight, tile_rows: int, tiles: int) -> bool:
    faster = tile_rows > FEW_ROWS or (tiles >= MANY_TILES and weight.numbers == "e2m1")
    return weight.factors is None and tile_rows in GROUPED_WAYS and faster


def stays(weight: FourBitWeight, rows: int) -> bool:
    if weight.factors is not None:
        return False
    least = next((few for outputs, few in LEAST_ROWS.items() if weight.shape[0] >= outputs), None)
    if least is None:
        return rows >= LEAST_ROWS_OF_LONG and min(weight.shape) >= LONG
    return rows >= least


def product(x: Tensor, weight: FourBitWeight, bias: Tensor | None, counter: Tensor) -> Tensor:
    """As that of `four_bit_stream`."""
    out = x.new_empty(len(x), weight.shape[0])
    way = WAYS[next((size for size in WAYS if size >= len(x)), max(WAYS))]
    launch(x.contiguous(), weight, bias, out, way, multiprocessors(x.device), counter, None, None, None, 1)
    return out


def grouped_product(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None, order: Tensor, owner: Tensor, pairs_a_row: int,
    pair_weights: Tensor | None, pairs: int, tile_rows: int, counter: Tensor, placed: bool,
) -> Tensor:  # fmt: skip
    """As that of `four_bit_stream`."""
    out, way, processors = x.new_empty(pairs, weight.shape[1]), GROUPED_WAYS[tile_rows], multiprocessors(x.device)
    launch(x, weight, bias, out, way, processors, counter, order, owner, pair_weights, pairs_a_row, placed)
    return out


def launch(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None, out: Tensor, way: Stay, processors: int, counter: Tensor,
    order: Tensor | None, owner: Tensor | None, pair_weights: Tensor | None, pairs_a_row: int, placed: bool = False,
) -> None:  # fmt: skip
    """`counter` holds zeros, and does so again afterwards."""
    outputs, inputs = weight.shape[-2:]
    each = weight.scales.shape[-1]
    scale_bytes = each * weight.scales.element_size() + (each if weight.zeros is not None else 0)
    by_rows = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    packed = weight.values.view(torch.int16).flatten(0, -2)
    values = TensorDescriptor.from_tensor(packed, [HEIGHT, STEP // 4], by_rows)
    xs = x if order is not None else TensorDescriptor.from_tensor(x, [copied_at_once(way.rows), STEP], by_rows)
    row_tiles = triton.cdiv(len(x), way.rows) if owner is None else len(owner)
    steps = row_tiles * triton.cdiv(outputs, way.parts * HEIGHT) * triton.cdiv(inputs, STEP)
    programs = min(processors * way.together, triton.cdiv(steps, LEAST_STEPS))
    partial = out.new_empty(programs, 2, way.parts * HEIGHT * way.rows, dtype=torch.float32)
    copying = COPYING if order is None else GATHERING[way.rows]
    stay_four_bit[(programs,)](
        values, xs, bytes_of(weight.scales, HEIGHT), None if weight.zeros is None else bytes_of(weight.zeros, HEIGHT),
        bias, out, partial, counter, order, owner, pair_weights, len(out), row_tiles, pairs_a_row, outputs, inputs,
        E2M1=weight.numbers == "e2m1", ZEROS=weight.zeros is not None, EACH=each,
        SCALE=SCALE_KINDS.get(weight.scales.dtype, gl.float32), STEPS_A_GROUP=max(1, weight.group // STEP),
        HAS_BIAS=bias is not None, GROUPED=order is not None, PLACED=placed, WEIGHED=pair_weights is not None,
        ROWS=way.rows, PARTS=way.parts, STAGES=way.stages(STEP // 2 + scale_bytes), LEAST=LEAST_STEPS,
        TAKEN=way.taken(copying), COPYING=copying, num_warps=4, maxnreg=way.registers, launch_pdl=True,
    )  # fmt: skip
