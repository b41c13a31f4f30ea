"""Products of experts of few tokens, for Hopper: weights stream through shared memory by bulk copies.

See `stream` for how one matrix is multiplied so. Whose experts the pairs of a second product are was known before the
first one began: its weights are on their way while that ends.
"""

from __future__ import annotations

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
from triton.language.extra import cuda

from phalanx.kernels.fp8 import GROUP, Fp8Weight, Quantised
from phalanx.kernels.gpu.stream import (
    LEAST_BYTES,
    OUTPUTS,
    SHARED_BYTES,
    SYSTEM_BYTES,
    all_threads,
    copy_in,
    multiprocessors,
    row_by_row,
    step_of,
    tiles_of,
    two_groups,
)

TOGETHER, FP8_TOGETHER = 2, 3
"""Programs that a multiprocessor has room for, at least."""

COLUMNS = 16
"""What rows must be multiples of, which is what Triton asks of a number: rows of x are copied 16 bytes at once."""


@gluon.jit(do_not_specialize=["pairs", "x_rows"])
def stream_experts(
    weights, x, weight_scales, x_scales, bias, order, owner, pair_weights, out, pairs, x_rows, pairs_a_row, outputs,
    inputs, scale_rows, GROUPS: gl.constexpr, ROW_BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, PLACED: gl.constexpr,
    WEIGHED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A tile of one expert, [OUTPUTS, ROWS]: out[pair] = x[pair // pairs_a_row] @ weight.T + bias, or times its weight.

    FP8 with GROUPS, as `stream` multiplies it. PLACED: order and owner were there before the kernel ahead began.
    """
    FP8: gl.constexpr = GROUPS > 0
    OUTPUTS: gl.constexpr = weights.block_shape[0]
    STEP: gl.constexpr = weights.block_shape[1]
    WARPS: gl.constexpr = OUTPUTS // 16
    BITS: gl.constexpr = weights.dtype.primitive_bitwidth
    BYTES: gl.constexpr = OUTPUTS * STEP * BITS // 8
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 256 // BITS])
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    tile, first_output = gl.program_id(0), gl.program_id(1) * OUTPUTS
    steps = gl.cdiv(inputs, STEP)

    weight_stages = gl.allocate_shared_memory(weights.dtype, [STAGES, OUTPUTS, STEP], weights.layout)
    x_stages = gl.allocate_shared_memory(weights.dtype, [STAGES, ROWS, STEP], X_LAYOUT)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
    fence_async_shared()
    if not PLACED:
        cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    expert = gl.load(owner + tile)
    if expert < 0:
        return
    weight_row = expert * outputs + first_output
    for i in gl.static_range(STAGES):
        mbarrier.expect(filled.index(i), BYTES, pred=i < steps)
        copy_in(weights, [weight_row, i * STEP], filled.index(i), weight_stages.index(i), pred=i < steps)
    apart: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [2, 16], [WARPS, 1], [1, 0])
    taken = gl.load(order + tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, apart)))
    column = gl.arange(0, STEP, gl.SliceLayout(0, apart))
    x_row = x + (taken // pairs_a_row).to(gl.int64)[:, None] * inputs + column[None, :]
    is_known = (taken < pairs)[:, None]
    if FP8:
        LANES: gl.constexpr = min(ROWS, 32)
        spread: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS, 1], [1, 0])
        groups = gl.cdiv(inputs, 128)
        group = gl.arange(0, GROUPS, gl.SliceLayout(1, spread))
        scale = weight_scales + (expert * scale_rows + first_output // ROW_BLOCK) * groups + group
        by_output = gl.load(scale, mask=group < groups, other=0.0)
        scaled = gl.load(order + tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, spread)))

    if PLACED:
        cuda.gdc_wait()
    for i in gl.static_range(STAGES):
        mask = is_known & (i * STEP + column < inputs)[None, :]
        async_copy.async_copy_global_to_shared(x_stages.index(i), x_row + i * STEP, mask=mask)
        async_copy.commit_group()
    if FP8:
        place = x_scales + group[:, None] * x_rows + (scaled // pairs_a_row)[None, :]
        known = (group < groups)[:, None] & (scaled < pairs)[None, :]
        table = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        table.store(gl.load(place, mask=known, other=0.0) * by_output[:, None])
        factors = row_by_row(table)

    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    for i in range(steps):
        here, following = i % STAGES, i + STAGES
        weight, rows = weight_stages.index(here), x_stages.index(here)
        async_copy.wait_group(STAGES - 1)
        mbarrier.wait(filled.index(here), (i // STAGES) & 1)
        all_threads()
        fence_async_shared()
        if FP8:
            acc, right, right_factor = two_groups(weight, rows, acc, factors, i, layout)
        else:
            acc = warpgroup_mma(weight, rows.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
        mbarrier.expect(filled.index(here), BYTES, pred=following < steps)
        copy_in(weights, [weight_row, following * STEP], filled.index(here), weight, pred=following < steps)
        mask = is_known & (following * STEP + column < inputs)[None, :]
        async_copy.async_copy_global_to_shared(rows, x_row + following * STEP, mask=mask)
        async_copy.commit_group()
        if FP8:
            acc += right * right_factor[None, :]

    output = first_output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    pair = gl.load(order + tile * ROWS + gl.arange(0, ROWS, by_row))
    if HAS_BIAS:
        of_output = gl.load(bias + expert * outputs + output, mask=output < outputs, other=0.0)
        acc += of_output.to(gl.float32)[:, None]
    if WEIGHED:
        acc *= gl.load(pair_weights + pair, mask=pair < pairs, other=0.0)[None, :]
    inside = (output[:, None] < outputs) & (pair[None, :] < pairs)
    gl.store(out + pair[None, :].to(gl.int64) * outputs + output[:, None], acc.to(out.dtype.element_ty), mask=inside)


def streams(dtype: torch.dtype, *weights: Tensor | Fp8Weight) -> bool:
    """On a GPU that has the instructions, of matrices that can be copied in bulk, one FP8 scale to a tile."""
    return all(_streams(weight, dtype) for weight in weights)


def _streams(weight: Tensor | Fp8Weight, dtype: torch.dtype) -> bool:
    values = weight.values if isinstance(weight, Fp8Weight) else weight
    in_tiles = weight.row_block % OUTPUTS == 0 if isinstance(weight, Fp8Weight) else values.dtype == dtype
    aligned = values.shape[-1] % COLUMNS == 0 and values.data_ptr() % LEAST_BYTES == 0
    return multiprocessors(values.device) > 0 and in_tiles and aligned and dtype != torch.float32


def stages_of(rows: int, steps: int, step_bytes: int, groups: int) -> int:
    """How many copies are in flight: as many as there is room for, but of few steps half. More programs then hide each
    other's waiting.
    """
    together = FP8_TOGETHER if groups else TOGETHER
    room = SHARED_BYTES // together - 2 * SYSTEM_BYTES - 4 * groups * rows
    return max(1, min(room // ((OUTPUTS + rows) * step_bytes), triton.cdiv(steps, 2)))


def product(
    x: Tensor | Quantised, weight: Tensor | Fp8Weight, bias: Tensor | None, order: Tensor, owner: Tensor,
    pairs_a_row: int, pair_weights: Tensor | None, out: Tensor, tile_rows: int, placed: bool,
) -> None:  # fmt: skip
    """out[pair] = x[pair // pairs_a_row] @ weight[expert].T + bias, or times its weight."""
    values, x_scales = x if isinstance(x, Quantised) else (x, None)
    _, outputs, inputs = weight.shape
    step, groups = step_of(x_scales is not None), 0
    steps = triton.cdiv(inputs, step)
    if isinstance(weight, Fp8Weight):
        matrices, scales, row_block, scale_rows = weight.values, weight.scales, weight.row_block, weight.scales.shape[1]
        groups = triton.next_power_of_2(steps * step // GROUP)
    else:
        matrices, scales, row_block, scale_rows = weight, None, OUTPUTS, 0
    stream_experts[(len(owner), triton.cdiv(outputs, OUTPUTS))](
        tiles_of(matrices.flatten(0, 1), OUTPUTS, step), values, scales, x_scales, bias, order, owner, pair_weights,
        out, len(out), len(values), pairs_a_row, outputs, inputs, scale_rows, GROUPS=groups, ROW_BLOCK=row_block,
        HAS_BIAS=bias is not None, PLACED=placed, WEIGHED=pair_weights is not None, ROWS=tile_rows,
        STAGES=stages_of(tile_rows, steps, step * values.itemsize, groups), num_warps=OUTPUTS // 16, launch_pdl=True,
    )  # fmt: skip
