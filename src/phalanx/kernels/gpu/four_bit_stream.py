"""Products of a few rows with weights of four bits, for Hopper: packed weights stream through shared memory by bulk
copies, with their scales, and are widened in the registers from which the tensor cores take them.

How codes are packed (`kernels.four_bit`) is how the tensor cores deal a matrix to threads: nothing is exchanged between
threads. See `stream` for what products in half precision and FP8 do; this is Gluon too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from phalanx.kernels.four_bit import STEP, FourBitWeight
from phalanx.kernels.gpu.four_bit_numbers import ASSEMBLY, UNFOLD
from phalanx.kernels.gpu.four_bit_widening import dealt_rows, of_half, tile_of, widened
from phalanx.kernels.gpu.stream import (
    LEAST_BYTES,
    SHARED_BYTES,
    SYSTEM_BYTES,
    all_threads,
    copied_at_once,
    copied_rows,
    copy_in,
    copy_rows,
    multiprocessors,
)

TOGETHER = {8: 4, 16: 4, 32: 3, 64: 2}
GROUPED_TOGETHER = {8: 5, 16: 4, 32: 4, 64: 2, 128: 1}
"""Programs on a multiprocessor by the rows of a tile, of one matrix and of experts. More rows of one matrix are several
tiles: the second finds the weights in the cache.
"""

FEW_TOGETHER = 3
"""Of the experts of one token, whose programs are so few: with more copies each in flight."""

ROW_TILES = tuple(GROUPED_TOGETHER)
MOST_STAGES = 8

MOST_SCALE_BYTES = 24
"""Of scales and zero points, what a row has in a step."""

LEAST_STEPS = 4
"""What one program takes: less is not worth a split."""

SCALE_KINDS = {torch.uint8: gl.uint8, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}

_STEP, _UNITS = gl.constexpr(STEP), gl.constexpr(STEP // 4)
_UNFOLD = gl.constexpr(UNFOLD)


@gluon.jit
def _copy_weight(
    values, scales, zeros, weight, scale, zero, full, weight_row, scale_row, tile, step, BYTES: gl.constexpr,
    STEPS_A_GROUP: gl.constexpr, ZEROS: gl.constexpr, pred,
):  # fmt: skip
    """A step of a tile: the weights, their scales and their zero points."""
    mbarrier.expect(full, BYTES, pred=pred)
    copy_in(values, [weight_row, step * _UNITS], full, weight, pred=pred)
    scale_row += step // STEPS_A_GROUP
    copy_in(scales, [scale_row, tile * scales.block_shape[1]], full, scale, pred=pred)
    if ZEROS:
        copy_in(zeros, [scale_row, tile * zeros.block_shape[1]], full, zero, pred=pred)


@gluon.jit(do_not_specialize=["rows"])
def stream_four_bit(
    values, xs, scales, zeros, factors, bias, out, partial, counter, order, owner, pair_weights, rows, pairs_a_row,
    outputs, inputs, E2M1: gl.constexpr, ZEROS: gl.constexpr, EACH: gl.constexpr, SCALE: gl.constexpr,
    STEPS_A_GROUP: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_BIAS: gl.constexpr, GROUPED: gl.constexpr,
    PLACED: gl.constexpr, WEIGHED: gl.constexpr, ROWS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A tile of x @ weight.T + bias, [OUTPUTS, ROWS]; where GROUPED, of one expert's, whose rows of x lie anywhere, and
    with PLACED whose they are was known before the kernel ahead began.

    Scales of few groups multiply their sums, others the weights. Programs that share a tile add up when the last of
    them is done.
    """
    OUTPUTS: gl.constexpr = values.block_shape[0]
    dtype: gl.constexpr = xs.dtype.element_ty if GROUPED else xs.dtype
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WEIGHT_BYTES: gl.constexpr = OUTPUTS * (_STEP // 2 + EACH * SCALE.primitive_bitwidth // 8 + (EACH if ZEROS else 0))
    BYTES: gl.constexpr = WEIGHT_BYTES + (0 if GROUPED else ROWS * _STEP * 2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    by_output: gl.constexpr = gl.SliceLayout(1, layout)
    of_rows: gl.constexpr = dealt_rows(WARPS)
    SUMS: gl.constexpr = (not E2M1) and EACH <= 2
    HALF: gl.constexpr = _STEP // 2
    if not GROUPED:
        cuda.gdc_launch_dependents()
    tile, split = gl.program_id(1), gl.program_id(2)
    steps = gl.cdiv(inputs, _STEP)
    share = gl.cdiv(steps, SPLITS)
    first = split * share
    count = gl.minimum(share, steps - first)

    weight_stages = gl.allocate_shared_memory(values.dtype, [STAGES, OUTPUTS, _UNITS], values.layout)
    scale_stages = gl.allocate_shared_memory(scales.dtype, [STAGES, 1, scales.block_shape[1]], scales.layout)
    if ZEROS:
        zero_stages = gl.allocate_shared_memory(zeros.dtype, [STAGES, 1, zeros.block_shape[1]], zeros.layout)
    else:
        zero_stages = scale_stages
    x_stages = gl.allocate_shared_memory(dtype, [STAGES, ROWS, _STEP], X_LAYOUT)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
    fence_async_shared()
    expert = 0
    if GROUPED:
        if not PLACED:
            cuda.gdc_wait()
        cuda.gdc_launch_dependents()
        first_row = gl.program_id(0) * ROWS
        expert = gl.load(owner + gl.program_id(0))
        if expert < 0:
            return
        apart: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
        slot = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, apart))
        taken = gl.load(order + slot)
        column = gl.arange(0, _STEP, gl.SliceLayout(0, apart))
        x_row = xs + (taken // pairs_a_row).to(gl.int64)[:, None] * inputs + column[None, :]
        is_known = (taken < rows)[:, None]
    else:
        first_row = gl.program_id(0) * ROWS
    weight_row = expert * outputs + tile * OUTPUTS
    scale_row = expert * gl.cdiv(steps, STEPS_A_GROUP)
    for i in gl.static_range(STAGES):
        _copy_weight(
            values, scales, zeros, weight_stages.index(i), scale_stages.index(i), zero_stages.index(i), filled.index(i),
            weight_row, scale_row, tile, first + i, BYTES, STEPS_A_GROUP, ZEROS, i < count,
        )  # fmt: skip
    if PLACED or not GROUPED:
        cuda.gdc_wait()
    for i in gl.static_range(STAGES):
        step = first + i
        if GROUPED:
            mask = is_known & (step * _STEP + column < inputs)[None, :] & (i < count)
            async_copy.async_copy_global_to_shared(x_stages.index(i), x_row + step * _STEP, mask=mask)
            async_copy.commit_group()
        else:
            copy_rows(xs, first_row, rows, step * _STEP, filled.index(i), x_stages.index(i), i < count)

    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    for i in range(count):
        here = i % STAGES
        mbarrier.wait(filled.index(here), (i // STAGES) & 1)
        if GROUPED:
            async_copy.wait_group(STAGES - 1)
            all_threads()
            fence_async_shared()
        weight, x = weight_stages.index(here), x_stages.index(here)
        scale_tile = tile_of(scale_stages.index(here), SCALE, OUTPUTS, EACH)
        zero_tile = tile_of(zero_stages.index(here), gl.uint8, OUTPUTS, EACH) if ZEROS else scale_tile
        left = widened(weight, scale_tile, zero_tile, dtype, E2M1, ZEROS, SUMS, OUTPUTS, EACH, 0, WARPS, operand)
        left_x, right_x = x.slice(0, HALF, 1).permute((1, 0)), x.slice(HALF, HALF, 1).permute((1, 0))
        if SUMS:
            none = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
            left_sum = warpgroup_mma(left, left_x, none, use_acc=False, is_async=True)
        else:
            acc = warpgroup_mma(left, left_x, acc, is_async=True)
        right = widened(weight, scale_tile, zero_tile, dtype, E2M1, ZEROS, SUMS, OUTPUTS, EACH, 1, WARPS, operand)
        if SUMS:
            right_sum = warpgroup_mma(right, right_x, none, use_acc=False, is_async=True)
            left_scale = of_half(scale_tile, 0, EACH).load(of_rows).to(gl.float32).reshape([OUTPUTS])
            right_scale = of_half(scale_tile, 1, EACH).load(of_rows).to(gl.float32).reshape([OUTPUTS])
            left_sum = warpgroup_mma_wait(1, [left_sum])
            acc += left_sum * gl.convert_layout(left_scale, by_output, assert_trivial=True)[:, None]
            right_sum = warpgroup_mma_wait(0, [right_sum])
            acc += right_sum * gl.convert_layout(right_scale, by_output, assert_trivial=True)[:, None]
        else:
            acc = warpgroup_mma(right, right_x, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
        more, full, step = i + STAGES < count, filled.index(here), first + i + STAGES
        _copy_weight(
            values, scales, zeros, weight, scale_stages.index(here), zero_stages.index(here), full, weight_row,
            scale_row, tile, step, BYTES, STEPS_A_GROUP, ZEROS, more,
        )  # fmt: skip
        if GROUPED:
            mask = is_known & (step * _STEP + column < inputs)[None, :] & more
            async_copy.async_copy_global_to_shared(x_stages.index(here), x_row + step * _STEP, mask=mask)
            async_copy.commit_group()
        else:
            copy_rows(xs, first_row, rows, step * _STEP, full, x_stages.index(here), more)
    if E2M1:
        acc *= _UNFOLD

    inner, across = gl.arange(0, OUTPUTS, by_output), gl.arange(0, ROWS, by_row)
    output = tile * OUTPUTS + inner
    if GROUPED:
        row = gl.load(order + first_row + across)
    else:
        row = copied_rows(first_row, rows, across, ROWS, xs.block_shape[0])
    shared_tile = tile * gl.num_programs(0) + gl.program_id(0)
    last = True
    if SPLITS > 1:
        parts = partial + (shared_tile * SPLITS).to(gl.int64) * (OUTPUTS * ROWS)
        parts += inner[:, None] * ROWS + across[None, :]
        gl.store(parts + split * (OUTPUTS * ROWS), acc)
        all_threads()
        last = gl.atomic_add(counter + shared_tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            acc = gl.load(parts, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                acc += gl.load(parts + other * (OUTPUTS * ROWS), cache_modifier=".cg")
            gl.store(counter + shared_tile, 0)
    if last:
        of_all = expert * outputs + output
        if HAS_FACTORS:
            acc *= gl.load(factors + of_all, mask=output < outputs, other=0.0)[:, None]
        if HAS_BIAS:
            acc += gl.load(bias + of_all, mask=output < outputs, other=0.0).to(gl.float32)[:, None]
        if WEIGHED:
            acc *= gl.load(pair_weights + row, mask=row < rows, other=0.0)[None, :]
        inside = (output[:, None] < outputs) & (row[None, :] < rows)
        gl.store(out + row[None, :].to(gl.int64) * outputs + output[:, None], acc.to(out.dtype.element_ty), mask=inside)


class TileCut(NamedTuple):
    """How a product is cut: rows and outputs of a tile, how many programs share one, and copies in flight."""

    rows: int
    outputs: int
    splits: int
    stages: int

    @property
    def warps(self) -> int:
        return self.outputs // 16


def cut_of(rows: int, outputs: int, inputs: int, tiles_of_rows: int, at_once: int, grouped: bool) -> TileCut:
    """As many programs on a multiprocessor as were fastest: widening waits for memory and for the tensor cores in turn.

    Programs are split over the inputs until so many run on each. Of experts, tiles that nobody has count too: they are
    split where there are as many tiles as a single token has experts.
    """
    height = 128 if rows > 64 else 64
    tiles, steps = tiles_of_rows * triton.cdiv(outputs, height), triton.cdiv(inputs, STEP)
    few = grouped and rows == min(ROW_TILES) and tiles <= FEW_TOGETHER * at_once
    together = FEW_TOGETHER if few else (GROUPED_TOGETHER if grouped else TOGETHER)[rows]
    splits = max(1, min(together * at_once // tiles, steps // LEAST_STEPS)) if few or not grouped else 1
    share = triton.cdiv(steps, splits)
    stage_bytes = height * (STEP // 2 + MOST_SCALE_BYTES) + rows * STEP * 2
    stages = (SHARED_BYTES // together - 2 * SYSTEM_BYTES) // stage_bytes
    return TileCut(rows, height, triton.cdiv(steps, share), max(2, min(MOST_STAGES, stages)))


def streams(dtype: torch.dtype, weight: FourBitWeight) -> bool:
    """On a GPU that has the instructions, of matrices that can be copied in bulk, whose scales go by steps."""
    device = weight.values.device
    if device.type != "cuda" or not multiprocessors(device) or (weight.numbers, dtype) not in ASSEMBLY:
        return False
    each, (outputs, inputs) = weight.scales.shape[-1], weight.shape[-2:]
    if weight.scales.element_size() == 1 and weight.scales.dtype != torch.uint8:
        return False
    by_steps = each <= 8 and (weight.group * each == STEP or weight.group % STEP == 0)
    aligned = outputs * each % LEAST_BYTES == 0 and inputs % 8 == 0
    return by_steps and aligned and weight.values.data_ptr() % LEAST_BYTES == 0


def bytes_of(part: Tensor, run: int) -> TensorDescriptor:
    """What a step has of `run` outputs, as one run of bytes, copied four at a time."""
    words = part.flatten(-2).flatten(0, -2).view(torch.int32) if part.dim() > 2 else part
    size = run * part.shape[-1] * part.element_size() // 4
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(words, [1, size], layout)


def _launch(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None, out: Tensor, shape: TileCut, grid: tuple[int, int, int],
    partial: Tensor | None, counter: Tensor | None, rows: int, order: Tensor | None, owner: Tensor | None,
    pair_weights: Tensor | None, pairs_a_row: int, placed: bool = False,
) -> None:  # fmt: skip
    outputs, inputs = weight.shape[-2:]
    packed = weight.values.view(torch.int16).flatten(0, -2)
    by_rows = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    values = TensorDescriptor.from_tensor(packed, [shape.outputs, STEP // 4], by_rows)
    xs = x if order is not None else TensorDescriptor.from_tensor(x, [copied_at_once(shape.rows), STEP], by_rows)
    stream_four_bit[grid](
        values, xs, bytes_of(weight.scales, shape.outputs),
        None if weight.zeros is None else bytes_of(weight.zeros, shape.outputs), weight.factors, bias, out, partial,
        counter, order, owner, pair_weights, rows, pairs_a_row, outputs, inputs, E2M1=weight.numbers == "e2m1",
        ZEROS=weight.zeros is not None, EACH=weight.scales.shape[-1],
        SCALE=SCALE_KINDS.get(weight.scales.dtype, gl.float32), STEPS_A_GROUP=max(1, weight.group // STEP),
        HAS_FACTORS=weight.factors is not None, HAS_BIAS=bias is not None, GROUPED=order is not None,
        PLACED=placed, WEIGHED=pair_weights is not None, ROWS=shape.rows, SPLITS=shape.splits, STAGES=shape.stages,
        WARPS=shape.warps, num_warps=shape.warps, launch_pdl=True,
    )  # fmt: skip


def _partial(out: Tensor, shape: TileCut, grid: tuple[int, int, int]) -> Tensor | None:
    """Room for the sums of programs that share a tile."""
    if shape.splits == 1:
        return None
    return out.new_empty(*grid, shape.outputs * shape.rows, dtype=torch.float32)


def product(x: Tensor, weight: FourBitWeight, bias: Tensor | None, counter: Tensor) -> Tensor:
    """x @ weight.T + bias. `counter` holds zeros, and does so again afterwards."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    height = next((size for size in TOGETHER if size >= rows), max(TOGETHER))
    row_tiles = triton.cdiv(rows, height)
    shape = cut_of(height, outputs, inputs, row_tiles, multiprocessors(x.device), grouped=False)
    grid = row_tiles, triton.cdiv(outputs, shape.outputs), shape.splits
    out = x.new_empty(rows, outputs)
    partial = _partial(out, shape, grid)
    _launch(x.contiguous(), weight, bias, out, shape, grid, partial, counter, rows, None, None, None, 1)
    return out


def grouped_product(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None, order: Tensor, owner: Tensor, pairs_a_row: int,
    pair_weights: Tensor | None, pairs: int, tile_rows: int, counter: Tensor, placed: bool,
) -> Tensor:  # fmt: skip
    """out[pair] = x[pair // pairs_a_row] @ weight[expert].T + bias, or times its weight. `counter` as in `product`."""
    _, outputs, inputs = weight.shape
    shape = cut_of(tile_rows, outputs, inputs, len(owner), multiprocessors(x.device), grouped=True)
    out = x.new_empty(pairs, outputs)
    grid = len(owner), triton.cdiv(outputs, shape.outputs), shape.splits
    partial = _partial(out, shape, grid)
    _launch(x, weight, bias, out, shape, grid, partial, counter, pairs, order, owner, pair_weights, pairs_a_row, placed)
    return out
