"""Products of a few rows, for Hopper: the weight streams through shared memory by bulk copies, once for all rows.

The first copies of the weight are on their way before the kernel ahead has ended: none writes to weights, and memory
does not idle between two products. This is Gluon, Triton's language without its automatic layouts and pipelines, which
cannot be told that only x has to wait.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from phalanx.kernels.fp8 import GROUP, Fp8Weight, Quantised

MOST_ROWS = 64
MOST_FP8_ROWS = 128
"""For products whose programs are on the GPU all at once: with more, and more than 64 rows, the library is faster."""

OUTPUTS = 64
"""Outputs of one program: the fewest that the tensor cores take, and enough programs for products with few outputs."""

SHARED_BYTES, SYSTEM_BYTES = 228 * 1024, 1024
"""A multiprocessor's shared memory, and what the system takes of it for each program."""

MOST_STAGES = 10
"""More copies at the start are more than a short program waits for."""

LONG_BYTES = 2**20
"""What a long program reads of a weight."""

LEAST_STEPS, MOST_STEPS = 8, 256
"""Groups of 128 inputs that one program takes: fewer are not worth a split, and of more the factors would not fit."""

LEAST_BYTES = 16
"""What the rows of a matrix must be multiples of to be copied in bulk."""

copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
all_threads = getattr(gl, "barrier", None) or gl.thread_barrier
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Gluon's names differ between Triton 3.6 and 3.9."""


@gluon.jit(do_not_specialize=["rows"])
def stream(
    weights, xs, weight_scales, x_scales, bias, out, partial, counter, rows, outputs, inputs,
    GROUPS: gl.constexpr, ROW_BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A tile of x @ weight.T + bias, [OUTPUTS, ROWS]: the weight on the left, where the tensor cores want 64 rows.

    With GROUPS the operands are FP8 and each group of 128 inputs has a factor for every row; GROUPS holds one split's.
    Programs that share a tile add up when the last of them is done.
    """
    FP8: gl.constexpr = GROUPS > 0
    OUTPUTS: gl.constexpr = weights.block_shape[0]
    STEP: gl.constexpr = weights.block_shape[1]
    ROWS: gl.constexpr = xs.block_shape[0]
    BYTES: gl.constexpr = (OUTPUTS + ROWS) * STEP * weights.dtype.primitive_bitwidth // 8
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32 if FP8 else 16])
    cuda.gdc_launch_dependents()
    tile, split = gl.program_id(0), gl.program_id(1)
    steps = gl.cdiv(inputs, STEP)
    share = gl.cdiv(steps, SPLITS)
    first = split * share
    count = gl.minimum(share, steps - first)

    weight_stages = gl.allocate_shared_memory(weights.dtype, [STAGES, OUTPUTS, STEP], weights.layout)
    x_stages = gl.allocate_shared_memory(xs.dtype, [STAGES, ROWS, STEP], xs.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        mbarrier.expect(filled.index(i), BYTES, pred=i < count)
        at = [tile * OUTPUTS, (first + i) * STEP]
        copy_in(weights, at, filled.index(i), weight_stages.index(i), pred=i < count)
    if FP8:
        LANES: gl.constexpr = min(ROWS, 32)
        spread: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [4, 1], [1, 0])
        group = first + gl.arange(0, GROUPS, gl.SliceLayout(1, spread))
        column = gl.arange(0, ROWS, gl.SliceLayout(0, spread))
        scale = gl.load(weight_scales + (tile * OUTPUTS // ROW_BLOCK) * steps + group, mask=group < steps, other=0.0)

    cuda.gdc_wait()
    for i in gl.static_range(STAGES):
        copy_in(xs, [0, (first + i) * STEP], filled.index(i), x_stages.index(i), pred=i < count)
    if FP8:
        place = x_scales + group[:, None].to(gl.int64) * rows + column[None, :]
        known = (group < steps)[:, None] & (column < rows)[None, :]
        table = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        table.store(gl.load(place, mask=known, other=0.0) * scale[:, None])
        if HAS_REINTERPRET:
            factors = table.reinterpret(gl.float32, [GROUPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        else:
            factors = table._reinterpret(gl.float32, [GROUPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    for i in range(count):
        stage = i % STAGES
        full, weight, x = filled.index(stage), weight_stages.index(stage), x_stages.index(stage)
        mbarrier.wait(full, (i // STAGES) & 1)
        if FP8:
            none = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
            product = warpgroup_mma(weight, x.permute((1, 0)), none, use_acc=False, is_async=True)
            factor = factors.index(i).load(gl.SliceLayout(0, layout))
            product = warpgroup_mma_wait(0, [product])
        else:
            acc = warpgroup_mma(weight, x.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
        more = i + STAGES < count
        mbarrier.expect(full, BYTES, pred=more)
        copy_in(weights, [tile * OUTPUTS, (first + i + STAGES) * STEP], full, weight, pred=more)
        copy_in(xs, [0, (first + i + STAGES) * STEP], full, x, pred=more)
        if FP8:
            acc += product * factor[None, :]

    inner = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    output, row = tile * OUTPUTS + inner, gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    last = True
    if SPLITS > 1:
        parts = partial + (tile * SPLITS).to(gl.int64) * (OUTPUTS * ROWS) + inner[:, None] * ROWS + row[None, :]
        gl.store(parts + split * (OUTPUTS * ROWS), acc)
        all_threads()
        last = gl.atomic_add(counter + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            acc = gl.load(parts, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                acc += gl.load(parts + other * (OUTPUTS * ROWS), cache_modifier=".cg")
            gl.store(counter + tile, 0)
    if last:
        if HAS_BIAS:
            acc += gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)[:, None]
        mask = (output[:, None] < outputs) & (row[None, :] < rows)
        gl.store(out + row[None, :].to(gl.int64) * outputs + output[:, None], acc.to(out.dtype.element_ty), mask=mask)


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a Hopper; another GPU has none that could run this kernel."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count) if properties.major == 9 else 0


def can_stream(x: Tensor, weight: Tensor, row_block: int = OUTPUTS) -> bool:
    """Few rows, on a GPU that has the instructions, of matrices that can be copied in bulk, one FP8 scale to a tile."""
    at_once = multiprocessors(x.device)
    in_fp8 = x.dtype == torch.float8_e4m3fn
    most_rows = MOST_FP8_ROWS if in_fp8 and weight.shape[0] <= at_once * OUTPUTS else MOST_ROWS
    few = x.shape[0] <= most_rows and (in_fp8 or x.dtype in (torch.bfloat16, torch.float16))
    aligned = weight.shape[1] * weight.itemsize % LEAST_BYTES == 0 and weight.data_ptr() % LEAST_BYTES == 0
    return few and aligned and row_block % OUTPUTS == 0 and at_once > 0


def is_alone(programs: int, at_once: int, weight_bytes: int) -> bool:
    """Whether a program should have one of `at_once` multiprocessors to itself, or share it with a second one.

    Those that share end at about the same time. Long programs, if there are not many, had better take turns: where no
    second one follows, the next kernel moves in early.
    """
    return programs <= (2 * at_once if weight_bytes >= LONG_BYTES else at_once)


def stages_of(stage_bytes: int, table_bytes: int, alone: bool) -> int:
    """How many copies a program has in flight."""
    if not alone:
        return max(2, (SHARED_BYTES // 2 - SYSTEM_BYTES - table_bytes) // stage_bytes)
    enough = triton.cdiv(SHARED_BYTES // 2, stage_bytes)  # and no room is left for another
    return min(MOST_STAGES, enough, (SHARED_BYTES - 2 * SYSTEM_BYTES - table_bytes) // stage_bytes)


def tiles_of(matrix: Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * matrix.itemsize, rank=2)
    return TensorDescriptor.from_tensor(matrix.contiguous(), [rows, GROUP], layout)


def stream_product(
    x: Tensor | Quantised, weight: Tensor | Fp8Weight, bias: Tensor | None, dtype: torch.dtype, counter: Tensor
) -> Tensor:
    """x @ weight.T + bias. `counter` holds zeros, and does so again afterwards."""
    values, x_scales = x if isinstance(x, Quantised) else (x, None)
    scales, row_block = (weight.scales, weight.row_block) if isinstance(weight, Fp8Weight) else (None, OUTPUTS)
    rows, (outputs, inputs) = values.shape[0], weight.shape
    tile_rows = max(8, triton.next_power_of_2(rows))
    tiles, steps = triton.cdiv(outputs, OUTPUTS), triton.cdiv(inputs, GROUP)
    at_once = multiprocessors(values.device)
    splits = max(1, min(at_once // tiles, steps // LEAST_STEPS), triton.cdiv(steps, MOST_STEPS))
    share = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, share)  # no share is empty
    groups = 0 if scales is None else triton.next_power_of_2(share)
    step_bytes = GROUP * values.itemsize
    alone = is_alone(tiles * splits, at_once, OUTPUTS * share * step_bytes)
    stages = stages_of((OUTPUTS + tile_rows) * step_bytes, 4 * groups * tile_rows, alone)
    out = torch.empty(rows, outputs, dtype=dtype, device=values.device)
    partial = out.new_empty(tiles * splits * OUTPUTS * tile_rows, dtype=torch.float32) if splits > 1 else None
    stream[(tiles, splits)](
        tiles_of(weight.values if isinstance(weight, Fp8Weight) else weight, OUTPUTS), tiles_of(values, tile_rows),
        scales, x_scales, bias, out, partial, counter, rows, outputs, inputs,
        GROUPS=groups, ROW_BLOCK=row_block, HAS_BIAS=bias is not None, SPLITS=splits, STAGES=stages, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
    return out
