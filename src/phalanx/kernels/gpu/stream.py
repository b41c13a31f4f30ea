"""Products of a few rows, for Hopper: the weight streams through shared memory by bulk copies, once for all rows.

Of more rows, up to 256, those are streamed whose programs are on the GPU all at once and end soon.

The first copies of the weight are on their way before the kernel ahead has ended: none writes to weights, and memory
does not idle between two products. This is Gluon, Triton's language without its automatic layouts and pipelines, which
cannot be told that only x has to wait.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

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

FEW_ROWS = 64
MOST_ROWS, MOST_FP8_ROWS = 256, 128
"""Few rows are always streamed; more, up to these, if tiles of TILE_ROWS make no more programs than run at once."""

TILE_ROWS = (64, 128)

HALVED_ROWS = 64
"""Tiles of so many rows and more are copied in halves."""

OUTPUTS, WIDE_OUTPUTS = 64, 128
"""Outputs of one program: the fewest that the tensor cores take, and enough programs for products with few outputs.
Of long products in FP8 with more than few rows twice as many, where there would be more programs than run at once.
"""

SHARED_BYTES, SYSTEM_BYTES = 228 * 1024, 1024
"""A multiprocessor's shared memory, and what the system takes of it for each program."""

LEAST_STAGES, MOST_STAGES = 3, 10
"""Copies of a program that is alone. More at the start are more than a short program waits for."""

LONG_BYTES = 2**20
"""What a long program reads of a weight."""

LEAST_INPUTS, LEAST_OF_FEW, VERY_FEW_ROWS = 8 * GROUP, 4 * GROUP, 8
"""What one program takes, and with very few rows: less is not worth a split."""

MOST_FACTORS = 2**13
"""FP8 factors that a program has room for, one for every group of inputs and row of its tile."""

MOST_READ = 2**18
"""Elements of x that a program with more than few rows may read: beyond them the half precision library is faster."""

LEAST_BYTES = 16
"""What the rows of a matrix must be multiples of to be copied in bulk."""

copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
all_threads = getattr(gl, "barrier", None) or gl.thread_barrier
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Gluon's names differ between Triton 3.6 and 3.9."""


@gluon.jit
def copy_rows(xs, first_row, rows, column, full, stage, pred=True):
    """A tile of x. Of two halves none begins where x has too few rows left: to fill a tile up with zeros takes longer
    than rows do, and that some come twice does no harm.
    """
    HALF: gl.constexpr = xs.block_shape[0]
    if stage.shape[0] == HALF:
        copy_in(xs, [first_row, column], full, stage, pred=pred)
    else:
        copy_in(xs, [gl.minimum(first_row, rows - HALF), column], full, stage.slice(0, HALF, 0), pred=pred)
        copy_in(xs, [gl.minimum(first_row + HALF, rows - HALF), column], full, stage.slice(HALF, HALF, 0), pred=pred)


@gluon.jit
def copied_rows(first_row, rows, across, ROWS: gl.constexpr, HALF: gl.constexpr):
    """Which rows those are."""
    row = first_row + across
    if ROWS > HALF:
        above = gl.minimum(first_row + HALF, rows - HALF) - HALF
        row = across + gl.where(across < HALF, gl.minimum(first_row, rows - HALF), above)
    return row


@gluon.jit
def row_by_row(table):
    """The factors of a group of inputs lie together."""
    by_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if HAS_REINTERPRET:
        return table.reinterpret(gl.float32, table.shape, by_rows)
    return table._reinterpret(gl.float32, table.shape, by_rows)


@gluon.jit
def two_groups(weight, x, acc, factors, step, LAYOUT: gl.constexpr):
    """A step in FP8: with the first group of inputs added, what is to be added of the second, and its factors."""
    by_row: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    none = gl.zeros(acc.shape, gl.float32, LAYOUT)
    left_x, right_x = x.slice(0, 128, 1).permute((1, 0)), x.slice(128, 128, 1).permute((1, 0))
    left = warpgroup_mma(weight.slice(0, 128, 1), left_x, none, use_acc=False, is_async=True)
    right = warpgroup_mma(weight.slice(128, 128, 1), right_x, none, use_acc=False, is_async=True)
    left_factor, right_factor = factors.index(2 * step).load(by_row), factors.index(2 * step + 1).load(by_row)
    left = warpgroup_mma_wait(1, [left])
    acc += left * left_factor[None, :]
    return acc, warpgroup_mma_wait(0, [right]), right_factor


@gluon.jit(do_not_specialize=["rows"])
def stream(
    weights, xs, weight_scales, x_scales, bias, out, partial, counter, rows, outputs, inputs,
    GROUPS: gl.constexpr, ROW_BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, ROWS: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A tile of x @ weight.T + bias, [OUTPUTS, ROWS]: the weight on the left, where the tensor cores want 64 rows.

    With GROUPS the operands are FP8 and each group of 128 inputs has a factor for every row; GROUPS holds one split's,
    and a step is two of them: one is multiplied by its factors while the tensor cores are at the other. Otherwise they
    begin with a step before the one ahead has made room for the next copy.
    Programs that share a tile add up when the last of them is done.
    """
    FP8: gl.constexpr = GROUPS > 0
    OUTPUTS: gl.constexpr = weights.block_shape[0]
    STEP: gl.constexpr = weights.block_shape[1]
    HALF: gl.constexpr = xs.block_shape[0]
    BYTES: gl.constexpr = (OUTPUTS + ROWS) * STEP * weights.dtype.primitive_bitwidth // 8
    BEHIND: gl.constexpr = 0 if FP8 else 1
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [OUTPUTS // 16, 1], [16, ROWS, 32 if FP8 else 16])
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    cuda.gdc_launch_dependents()
    first_row, tile, split = gl.program_id(0) * ROWS, gl.program_id(1), gl.program_id(2)
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
        spread: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [OUTPUTS // 16, 1], [1, 0])
        groups = gl.cdiv(inputs, 128)
        group = first * 2 + gl.arange(0, GROUPS, gl.SliceLayout(1, spread))
        column = copied_rows(first_row, rows, gl.arange(0, ROWS, gl.SliceLayout(0, spread)), ROWS, HALF)
        scale = gl.load(weight_scales + (tile * OUTPUTS // ROW_BLOCK) * groups + group, mask=group < groups, other=0.0)

    cuda.gdc_wait()
    for i in gl.static_range(STAGES):
        copy_rows(xs, first_row, rows, (first + i) * STEP, filled.index(i), x_stages.index(i), i < count)
    if FP8:
        place = x_scales + group[:, None].to(gl.int64) * rows + column[None, :]
        known = (group < groups)[:, None] & (column < rows)[None, :]
        table = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        table.store(gl.load(place, mask=known, other=0.0) * scale[:, None])
        factors = row_by_row(table)

    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    for i in range(count):
        weight, x = weight_stages.index(i % STAGES), x_stages.index(i % STAGES)
        mbarrier.wait(filled.index(i % STAGES), (i // STAGES) & 1)
        if FP8:
            acc, right, right_factor = two_groups(weight, x, acc, factors, i, layout)
        else:
            acc = warpgroup_mma(weight, x.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
        done = i - BEHIND
        stage, following = (done + STAGES) % STAGES, done + STAGES
        more = (done >= 0) & (following < count)
        full, start = filled.index(stage), (first + following) * STEP
        mbarrier.expect(full, BYTES, pred=more)
        copy_in(weights, [tile * OUTPUTS, start], full, weight_stages.index(stage), pred=more)
        copy_rows(xs, first_row, rows, start, full, x_stages.index(stage), more)
        if FP8:
            acc += right * right_factor[None, :]
    if not FP8:
        acc = warpgroup_mma_wait(0, [acc])

    inner, across = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout)), gl.arange(0, ROWS, by_row)
    output, row = tile * OUTPUTS + inner, copied_rows(first_row, rows, across, ROWS, HALF)
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
        if HAS_BIAS:
            acc += gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)[:, None]
        mask = (output[:, None] < outputs) & (row[None, :] < rows)
        gl.store(out + row[None, :].to(gl.int64) * outputs + output[:, None], acc.to(out.dtype.element_ty), mask=mask)


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a Hopper; another device has none that could run this kernel."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count) if properties.major == 9 else 0


def step_of(in_fp8: bool) -> int:
    """The inputs of one step, 256 bytes of a row."""
    return 2 * GROUP if in_fp8 else GROUP


class Cut(NamedTuple):
    """How a product is cut: rows and outputs of a tile, the tiles, how many programs share one, the inputs of each."""

    rows: int
    outputs: int
    row_tiles: int
    tiles: int
    splits: int
    inputs: int

    @property
    def programs(self) -> int:
        return self.row_tiles * self.tiles * self.splits


def cut(rows: int, outputs: int, inputs: int, in_fp8: bool, tile_rows: int, tile_outputs: int, at_once: int) -> Cut:
    """Split over the inputs, in steps, as long as all programs run at once, or until the factors fit."""
    step = step_of(in_fp8)
    row_tiles, tiles = triton.cdiv(rows, tile_rows), triton.cdiv(outputs, tile_outputs)
    steps = triton.cdiv(inputs, step)
    least = LEAST_OF_FEW if rows <= VERY_FEW_ROWS else LEAST_INPUTS
    splits = max(1, min(at_once // (row_tiles * tiles), inputs // least))
    if in_fp8:
        splits = max(splits, triton.cdiv(inputs * tile_rows, GROUP * MOST_FACTORS))
    share = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, share)  # no share is empty
    return Cut(tile_rows, tile_outputs, row_tiles, tiles, splits, share * step)


def best_cut(
    rows: int, outputs: int, inputs: int, in_fp8: bool, at_once: int, row_block: int = WIDE_OUTPUTS
) -> Cut | None:
    """None where the library is faster."""
    if rows <= FEW_ROWS:
        return cut(rows, outputs, inputs, in_fp8, max(8, triton.next_power_of_2(rows)), OUTPUTS, at_once)
    if rows > (MOST_FP8_ROWS if in_fp8 else MOST_ROWS):
        return None
    cuts = (cut(rows, outputs, inputs, in_fp8, tile_rows, OUTPUTS, at_once) for tile_rows in TILE_ROWS)
    found = next((each for each in cuts if each.row_tiles * each.tiles <= at_once), None)
    if found is None or not (in_fp8 or found.rows * found.inputs <= MOST_READ):
        return None
    if found.programs > at_once and row_block % WIDE_OUTPUTS == 0:
        wide = cut(rows, outputs, inputs, in_fp8, TILE_ROWS[-1], WIDE_OUTPUTS, at_once)
        return wide if wide.programs <= at_once else found
    return found


def way_to_stream(x: Tensor, weight: Tensor, row_block: int = OUTPUTS) -> Cut | None:
    """On a GPU that has the instructions, of matrices that can be copied in bulk, one FP8 scale to a tile."""
    at_once, in_fp8 = multiprocessors(x.device), x.dtype == torch.float8_e4m3fn
    known = in_fp8 or x.dtype in (torch.bfloat16, torch.float16)
    aligned = weight.shape[1] * weight.itemsize % LEAST_BYTES == 0 and weight.data_ptr() % LEAST_BYTES == 0
    if not (known and aligned and row_block % OUTPUTS == 0 and at_once > 0):
        return None
    outputs, inputs = weight.shape
    return best_cut(x.shape[0], outputs, inputs, in_fp8, at_once, row_block)


def is_alone(programs: int, at_once: int, weight_bytes: int) -> bool:
    """Whether a program should have one of `at_once` multiprocessors to itself, or share it with a second one.

    Those that share end at about the same time. Long programs, if there are not many, had better take turns: where no
    second one follows, the next kernel moves in early.
    """
    return programs <= (2 * at_once if weight_bytes >= LONG_BYTES else at_once)


def stages_of(stage_bytes: int, table_bytes: int, alone: bool, in_fp8: bool) -> int:
    """How many copies a program has room for. In half precision one is still multiplied when the next could come."""
    if not alone:
        return max(2, (SHARED_BYTES // 2 - SYSTEM_BYTES - table_bytes) // stage_bytes)
    enough = triton.cdiv(SHARED_BYTES // 2, stage_bytes)  # and no room is left for another program
    most = (SHARED_BYTES - 2 * SYSTEM_BYTES - table_bytes) // stage_bytes
    return min(MOST_STAGES, most, max(LEAST_STAGES, enough) if in_fp8 else enough + 1)


def copied_at_once(rows: int) -> int:
    """Of a tile of so many. In a tile of fewer, there are not many that x lacks."""
    return rows // 2 if rows >= HALVED_ROWS else rows


def tiles_of(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * matrix.itemsize, rank=2)
    return TensorDescriptor.from_tensor(matrix.contiguous(), [rows, columns], layout)


def stream_product(
    x: Tensor | Quantised,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    counter: Tensor,
    way: Cut,
) -> Tensor:
    """x @ weight.T + bias. `counter` holds zeros, and does so again afterwards."""
    values, x_scales = x if isinstance(x, Quantised) else (x, None)
    rows, (outputs, inputs) = values.shape[0], weight.shape
    if isinstance(weight, Fp8Weight):
        matrix, scales, row_block = weight.values, weight.scales, weight.row_block
        groups = triton.next_power_of_2(way.inputs // GROUP)
    else:
        matrix, scales, row_block, groups = weight, None, OUTPUTS, 0
    step = step_of(groups > 0)
    alone = is_alone(way.programs, multiprocessors(values.device), way.outputs * way.inputs * values.itemsize)
    stages = stages_of((way.outputs + way.rows) * step * values.itemsize, 4 * groups * way.rows, alone, groups > 0)
    out = torch.empty(rows, outputs, dtype=dtype, device=values.device)
    partial = out.new_empty(way.programs * way.outputs * way.rows, dtype=torch.float32) if way.splits > 1 else None
    stream[(way.row_tiles, way.tiles, way.splits)](
        tiles_of(matrix, way.outputs, step), tiles_of(values, copied_at_once(way.rows), step), scales, x_scales, bias,
        out, partial, counter, rows, outputs, inputs, GROUPS=groups, ROW_BLOCK=row_block, HAS_BIAS=bias is not None,
        ROWS=way.rows, SPLITS=way.splits, STAGES=stages, num_warps=way.outputs // 16, launch_pdl=True,
    )  # fmt: skip
    return out
