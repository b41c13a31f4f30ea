"""Products with a weight: of one row or a few, where reading the weight is the work, and in FP8."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.fp8 import GROUP, Fp8Weight, Quantised
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.shared_memory import stages_here

VECTOR_TILE, LONG_VECTOR_TILE, ODD_VECTOR_TILE = (4, 2048), (2, 4096), (4, 512)
"""Outputs and inputs that one program of a matrix-vector product takes at once; where it can take all of longer inputs;
and where blocks would be half empty."""
MANY_OUTPUTS = 4096
"""Of which programs hide each other's waiting."""

WIDE_TILES = {8: (4, 2, 2048), 128: (16, 4, 512)}
"""For up to so many rows, the rows, outputs and inputs that one program of a product in float32 takes at once. Of few
rows the weight decides: nothing hides the time until a block of it is there. More of them are read again and again.
"""

WIDE_ROWS = max(WIDE_TILES)
"""Up to these, a product in float32 is ours: the library takes two kernels, and a third for rows in half precision."""

LEAST_TO_PART, PARTED_AT_ONCE = 512, 1024
"""Rows of half precision from which on a weight in float32 is taken apart for tensor cores."""

COUNTERS = 4096

KNOWN_GLUON = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Gluon, an experiment of Triton's, changes from version to version: those that `stream` is written for."""

HAS_GLUON = triton.__version__.startswith(KNOWN_GLUON)
if HAS_GLUON:
    from phalanx.kernels.gpu.stream import stream_product, way_to_stream


class Tile(NamedTuple):
    """What one program computes, how much of the inputs it takes at once, and how it is run.

    Products with fewer tiles than `programs` are split over their inputs, down to LEAST_ROUNDS of them.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    programs: int = 1

    @property
    def streamed(self) -> bool:
        return self.outputs == 0


def streamed_tile(rows: int) -> Tile:
    """Of experts on Hoppers, whose kernels cut the rest themselves."""
    return Tile(rows, 0, 0, 0, 0)


LEAST_ROUNDS = 8

FP8_TILES = {
    16: Tile(16, 64, 128, 4, 6, 396),
    32: Tile(32, 64, 128, 4, 4, 512),
    64: Tile(64, 64, 128, 4, 4, 384),
    128: Tile(128, 64, 128, 4, 4, 256),
}
WIDE_FP8_TILES = FP8_TILES | {16: Tile(16, 128, 128, 4, 6, 264), 64: Tile(64, 128, 128, 4, 4, 264)}
"""For weights of WIDE_FROM outputs: enough tiles of this width to fill a GPU, and rows are read half as often."""

WIDENED_TILES = {16: Tile(16, 64, 128, 4, 4, 396), 64: Tile(64, 64, 128, 4, 3, 256)}
MOST_WIDENED_ROWS = 128
"""Above these it is quicker to widen the weight once and leave the product to the library. Not measured."""

WIDE_FROM = 14336
LIBRARY_ROWS = 65
LIBRARY_OUTPUTS, LIBRARY_WIDTH = 5120, 16
"""From these rows on the library's FP8 product is the faster one; up to 128 rows only if it has outputs to go round."""


def pick_tile(tiles: dict[int, Tile], rows: int) -> Tile:
    """The smallest that holds all rows, or the largest there is."""
    return tiles[next((size for size in tiles if size >= rows), max(tiles))]


@cache
def counters(device: torch.device) -> Tensor:
    """Zeros by which the programs that share a tile learn who is last; the last one puts the zero back."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _matrix_vector(
    x, weight, bias, out, inputs, outputs, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The first block of weights is asked for before the kernel ahead has ended: none writes to weights."""
    let_next_start()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    wanted = row[:, None] < outputs
    place = weight + row[:, None].to(tl.int64) * inputs + column
    block = tl.load(place, mask=wanted & (column < inputs), other=0.0)
    wait_for_ahead()
    acc = tl.load(x + column, mask=column < inputs, other=0.0).to(tl.float32) * block.to(tl.float32)
    for start in range(BLOCK, inputs, BLOCK):
        inside = start + column < inputs
        block = tl.load(place + start, mask=wanted & inside, other=0.0)
        acc += tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32) * block.to(tl.float32)
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=row < outputs)


def _vector_tile(outputs: int, inputs: int) -> tuple[int, int]:
    (_, block), (_, long) = VECTOR_TILE, LONG_VECTOR_TILE
    if inputs > block and 0 < inputs % block < block // 2 and outputs >= MANY_OUTPUTS:
        return ODD_VECTOR_TILE
    return LONG_VECTOR_TILE if long // 4 * 3 <= inputs <= long else VECTOR_TILE


def matrix_vector(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear for one row: the weight streams through once, nearer to memory speed than the library's product."""
    outputs, inputs = weight.shape
    rows, block = _vector_tile(outputs, inputs)
    out = weight.new_empty(1, outputs)
    block = min(block, triton.next_power_of_2(inputs))
    _matrix_vector[(triton.cdiv(outputs, rows),)](
        x, weight, bias, out, inputs, outputs, bias is not None, rows, block, launch_pdl=starts_early()
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _wide_product(
    x, weight, bias, out, rows, inputs, outputs, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of weights is asked for while the one before is multiplied, the first before the kernel ahead ends."""
    let_next_start()
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    wanted, known = output[:, None] < outputs, row[:, None] < rows
    weights, taken = weight + output[:, None].to(tl.int64) * inputs, x + row[:, None].to(tl.int64) * inputs
    block = tl.load(weights + column, mask=wanted & (column < inputs), other=0.0)
    wait_for_ahead()
    acc = tl.zeros([OUTPUTS, ROWS, BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK):
        values = tl.load(taken + start + column, mask=known & (start + column < inputs), other=0.0).to(tl.float32)
        acc += block[:, None, :] * values[None, :, :]
        following = start + BLOCK + column
        block = tl.load(weights + following, mask=wanted & (following < inputs), other=0.0)
    y = tl.sum(acc, 2)
    if HAS_BIAS:
        y += tl.load(bias + output, mask=output < outputs, other=0.0)[:, None]
    place = row[None, :].to(tl.int64) * outputs + output[:, None]
    tl.store(out + place, y, mask=(output[:, None] < outputs) & (row[None, :] < rows))


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A few rows of any precision, as a router has them, by a small weight in float32."""
    (count, _), (outputs, inputs) = x.shape, weight.shape
    rows, height, block = next(tile for most, tile in WIDE_TILES.items() if count <= most)
    out = torch.empty(count, outputs, dtype=torch.float32, device=x.device)
    _wide_product[(triton.cdiv(outputs, height), triton.cdiv(count, rows))](
        x.contiguous(), weight, bias, out, count, inputs, outputs, bias is not None, rows, height,
        min(block, triton.next_power_of_2(inputs)), num_warps=8, launch_pdl=starts_early(),
    )  # fmt: skip
    return out


@triton.jit
def _take_apart(weight, out, size, BLOCK: tl.constexpr):
    """Three numbers of bf16 whose sum one of float32 is."""
    let_next_start()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(weight + at, mask=at < size, other=0.0)
    wait_for_ahead()
    for part in tl.static_range(3):
        narrow = left.to(tl.bfloat16)
        tl.store(out + part * size + at, narrow, mask=at < size)
        left -= narrow.to(tl.float32)


def take_apart(weight: Tensor) -> Tensor:
    """Three matrices in bf16, one below the other, whose sum it is."""
    (outputs, inputs), size = weight.shape, weight.numel()
    parts = torch.empty(3 * outputs, inputs, dtype=torch.bfloat16, device=weight.device)
    grid = (triton.cdiv(size, PARTED_AT_ONCE),)
    _take_apart[grid](weight, parts, size, BLOCK=PARTED_AT_ONCE, launch_pdl=starts_early())
    return parts


def product_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Many rows in bf16 by a small weight in float32, which is multiplied as three in bf16: what tensor cores add up is
    in float32, and nothing else is rounded.
    """
    scores = torch.mm(x, take_apart(weight).t(), out_dtype=torch.float32)
    sums = scores.unflatten(1, (3, len(weight))).sum(1)
    return sums if bias is None else sums + bias


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, by whatever reads the weight fastest for so many rows. x is brought to the weight's precision."""
    if x.shape[0] == 1:
        return matrix_vector(x, weight, bias)
    if x.dtype != weight.dtype:
        if x.shape[0] <= WIDE_ROWS:
            return wide_product(x, weight, bias)
        if x.dtype == torch.bfloat16 and weight.dtype == torch.float32 and len(x) >= LEAST_TO_PART:
            return product_in_parts(x, weight, bias)
        x = x.to(weight.dtype)
    if HAS_GLUON and (way := way_to_stream(x, weight)) is not None:
        return stream_product(x, weight, bias, x.dtype, counters(x.device), way)
    return F.linear(x, weight, bias)


@triton.jit
def _widened_bytes(e4m3, dtype: tl.constexpr):
    """Bytes of e4m3 as other numbers, for cards that do not convert them: their bits, 120 powers of two too low."""
    byte = e4m3.to(tl.uint32)
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)


@triton.jit
def tile_product(
    x, x_scales, row, known, rows, weight, scales, first_scale, output, outputs, inputs, first, stop,
    FP8: tl.constexpr, ROW_BLOCK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """weight[output] @ x[row].T over the inputs from `first` to `stop`, in float32, [OUTPUTS, ROWS].

    The weight stands on the left, where the tensor cores want 64 rows; the few rows of x may be as few as 16. With FP8
    x has scales and is e4m3 as well, or else the weight comes as bytes, which are widened. Scales are for 128 inputs:
    of twice as many in a round, each half has its own.
    """
    WIDENED: tl.constexpr = FP8 and x_scales is None
    WIDTH: tl.constexpr = 128 if FP8 else INPUTS
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    wanted = output[:, None] < outputs
    weight_row = weight + output[:, None].to(tl.int64) * inputs
    x_row = x + row[None, :].to(tl.int64) * inputs
    if FP8:
        scale = scales + first_scale + (output // ROW_BLOCK) * tl.cdiv(inputs, 128)
        by_output = tl.load(scale + first // 128, mask=output < outputs, other=0.0)
        if not WIDENED:
            by_row = tl.load(x_scales + tl.cast(first // 128, tl.int64) * rows + row, mask=known, other=0.0)
    for start in range(first, stop, INPUTS):
        for half in tl.static_range(INPUTS // WIDTH):
            k = start + half * WIDTH + tl.arange(0, WIDTH)
            w = tl.load(weight_row + k[None, :], mask=wanted & (k[None, :] < inputs), other=0.0)
            a = tl.load(x_row + k[:, None], mask=known[None, :] & (k[:, None] < inputs), other=0.0)
            if FP8:  # the scales of the next inputs are on their way while these are multiplied
                group, more = start // 128 + half + 1, start + (half + 1) * WIDTH < stop
                next_by_output = tl.load(scale + group, mask=(output < outputs) & more, other=0.0)
                if WIDENED:
                    acc += tl.dot(_widened_bytes(w, a.dtype), a) * by_output[:, None]
                else:
                    next_place = x_scales + tl.cast(group, tl.int64) * rows + row
                    next_by_row = tl.load(next_place, mask=known & more, other=0.0)
                    acc += tl.dot(w, a) * (by_output[:, None] * by_row[None, :])
                    by_row = next_by_row
                by_output = next_by_output
            else:
                acc = tl.dot(w, a, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows", "splits"])
def _product(
    x, x_scales, weight, scales, bias, out, partial, counter, rows, outputs, inputs, splits,
    ROW_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SPLIT: tl.constexpr, STRIPE: tl.constexpr,
):  # fmt: skip
    """A tile of x @ weight.T + bias in FP8. Programs that share a tile add up when the last of them is done."""
    let_next_start()
    tile, split = tl.program_id(0), tl.program_id(1)
    row_tiles, output_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    above = tile // (STRIPE * output_tiles) * STRIPE
    height = tl.minimum(row_tiles - above, STRIPE)
    within = tile % (STRIPE * output_tiles)
    row = (above + within % height) * ROWS + tl.arange(0, ROWS)
    output = within // height * OUTPUTS + tl.arange(0, OUTPUTS)
    share = tl.cdiv(tl.cdiv(inputs, INPUTS), splits) * INPUTS
    first = split * share
    wait_for_ahead()
    acc = tile_product(
        x, x_scales, row, row < rows, rows, weight, scales, 0, output, outputs, inputs, first,
        tl.minimum(first + share, inputs), True, ROW_BLOCK, ROWS, OUTPUTS, INPUTS,
    )  # fmt: skip
    mask = (output[:, None] < outputs) & (row[None, :] < rows)
    place = row[None, :].to(tl.int64) * outputs + output[:, None]
    last = True
    if SPLIT:
        tl.store(partial + split.to(tl.int64) * rows * outputs + place, acc, mask=mask)
        tl.debug_barrier()
        last = tl.atomic_add(counter + tile, 1, sem="acq_rel") == splits - 1
        if last:
            acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for part in range(splits):
                theirs = partial + tl.cast(part, tl.int64) * rows * outputs + place
                acc += tl.load(theirs, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(counter + tile, 0)
    if last:
        if HAS_BIAS:
            acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


def run_tiles(x: Tensor | Quantised, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype, tile: Tile) -> Tensor:
    """Where x is not in FP8, the weight is widened."""
    values, x_scales = x if isinstance(x, Quantised) else (x.contiguous(), None)
    matrix = weight.values if isinstance(x, Quantised) else weight.values.view(torch.uint8)
    rows, (outputs, inputs) = values.shape[0], weight.shape
    out = torch.empty(rows, outputs, dtype=dtype, device=values.device)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    rounds = triton.cdiv(inputs, tile.inputs)
    splits = max(1, min(tile.programs // tiles, rounds // LEAST_ROUNDS))
    splits = triton.cdiv(rounds, triton.cdiv(rounds, splits))  # no share is empty
    partial = torch.empty(splits, rows, outputs, dtype=torch.float32, device=out.device) if splits > 1 else None
    _product[(tiles, splits)](
        values, x_scales, matrix, weight.scales, bias, out, partial, counters(out.device), rows, outputs,
        inputs, splits, ROW_BLOCK=weight.row_block, HAS_BIAS=bias is not None, ROWS=tile.rows, OUTPUTS=tile.outputs,
        INPUTS=tile.inputs, SPLIT=splits > 1, STRIPE=8, num_warps=tile.warps, num_stages=stages_here(tile.stages),
        launch_pdl=starts_early(),
    )  # fmt: skip
    return out


def widened_product(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """With x as it is, for cards that do not convert e4m3: few rows by a kernel that widens what it reads."""
    rows = x.shape[0]
    if rows > MOST_WIDENED_ROWS:
        return F.linear(x, weight.dequantised(x.dtype), bias)
    return run_tiles(x, weight, bias, x.dtype, pick_tile(WIDENED_TILES, rows))


def fp8_product(x: Quantised, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Few rows by a kernel that streams the weight, many by the library where whole tiles let it, others by tiles."""
    rows, (outputs, inputs) = x.values.shape[0], weight.shape
    if HAS_GLUON and (way := way_to_stream(x.values, weight.values, weight.row_block)) is not None:
        return stream_product(x, weight, bias, dtype, counters(x.values.device), way)
    in_tiles = weight.row_block == GROUP and outputs % LIBRARY_WIDTH == 0 and inputs % GROUP == 0
    many = rows >= LIBRARY_ROWS and (outputs >= LIBRARY_OUTPUTS or rows > max(FP8_TILES))
    if many and in_tiles and bias is None and dtype == torch.bfloat16 and _library_has_tiles(x.values.device):
        return _library_product(x, weight)
    tiles = WIDE_FP8_TILES if outputs >= WIDE_FROM else FP8_TILES
    return run_tiles(x, weight, bias, dtype, pick_tile(tiles, rows))


@cache
def _library_has_tiles(device: torch.device) -> bool:
    """Of all kinds of GPUs, only Hopper has a library product with scales by 1 x 128 and 128 x 128."""
    return torch.cuda.get_device_capability(device)[0] == 9


def _library_product(x: Quantised, weight: Fp8Weight) -> Tensor:
    """The library wants rows in fours, and scales of so many tiles of inputs."""
    (values, scales), rows = x, x.values.shape[0]
    if rows % 4:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, -rows % 4)).view(values.dtype)
        scales = F.pad(scales.t(), (0, -rows % 4)).t()
    by_tile = weight.scales
    if by_tile.shape[1] % 4:
        by_tile = F.pad(by_tile, (0, -by_tile.shape[1] % 4))
    by_rows, by_tiles = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return F.scaled_mm(values, weight.values.t(), scales, by_rows, by_tile.t(), by_tiles)[:rows]
