"""Products of a few rows with weights of four bits, for Hopper: these go from memory straight to the registers from
which the tensor cores take them.

No warp waits for anything but its own loads: there is no shared memory, and no barrier before the last sum. The tensor
cores take 16 outputs, 8 rows and 16 inputs at once; which inputs these are does not matter to a sum, so that a thread
reads whole blocks of 32. This is Gluon, for its layouts: every tensor has one element a thread, until sums are written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from phalanx.kernels.four_bit import BLOCK, STEP, FourBitWeight
from phalanx.kernels.gpu.four_bit_numbers import ASSEMBLY, UNFOLD, UNSCALED
from phalanx.kernels.gpu.stream import multiprocessors

TILE_ROWS, OUTPUTS = 8, 16
"""What the tensor cores take at once: fewer rows cost the same."""

MOST_ROWS, MOST_GROUPED_ROWS = 8, 8
"""Of one matrix, and of a tile of an expert: x is read again for every 16 outputs, and more of it is too much."""

WARPS, HELD, MOST_AT_ONCE = 4, 2, 3
"""Warps that share the inputs of a tile, and steps that each holds: so many, or all of them if these are not more."""

_STEP = gl.constexpr(STEP)
_BLOCKS = gl.constexpr(STEP // BLOCK)
_UNFOLD = gl.constexpr(UNFOLD)
_E2M1 = gl.constexpr(ASSEMBLY["e2m1", torch.bfloat16])
_INT4_BF16, _INT4_F16 = (gl.constexpr(UNSCALED[dtype]) for dtype in (torch.bfloat16, torch.float16))

_WORDS = gl.constexpr(
    "{ .reg .pred p, q; setp.ne.b32 p, $9, 0; setp.ne.b32 q, $10, 0; "
    "@p ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$8]; "
    "@q ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$4, $5, $6, $7}, [$8+64]; }"
)


def _load_x(masked: bool) -> str:
    """32 inputs of a row, or zeros."""
    loads, zeros = "", ""
    for i in range(0, 16, 4):
        words = ", ".join(f"${i + word}" for word in range(4))
        loads += f"{'@p ' if masked else ''}ld.global.v4.b32 {{{words}}}, [$16+{4 * i}]; "
        zeros += "".join(f"mov.b32 ${i + word}, 0; " for word in range(4))
    return f"{{ .reg .pred p; setp.ne.b32 p, $17, 0; {zeros} {loads} }}" if masked else loads


_X, _X_MASKED = gl.constexpr(_load_x(False)), gl.constexpr(_load_x(True))
_X_OUT = gl.constexpr("=r," * 16 + "l,r")
_MULTIPLY = """mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32
{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"""
_MULTIPLY_BF16, _MULTIPLY_F16 = (gl.constexpr(_MULTIPLY.replace("KIND", kind)) for kind in ("bf16", "f16"))
_SCALE = gl.constexpr("{ .reg .b32 t; prmt.b32 t, $1, 0, $2; mad.lo.u32 $0, t, 128, 0x2F002F00; }")
_FOUR, _EIGHT, _SIXTEEN = (gl.constexpr((gl.int32,) * count) for count in (4, 8, 16))


@gluon.jit
def _words_of_x(place, is_known, MASKED: gl.constexpr):
    return gl.inline_asm_elementwise(
        _X_MASKED if MASKED else _X, _X_OUT, [place.to(gl.int64), is_known.to(gl.int32)], dtype=_SIXTEEN,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _numbers(word, scale, offset, dtype: gl.constexpr, E2M1: gl.constexpr):
    """Eight numbers in four words."""
    return gl.inline_asm_elementwise(
        _E2M1 if E2M1 else (_INT4_BF16 if dtype == gl.bfloat16 else _INT4_F16), "=r,=r,=r,=r,r,r,r,r",
        [word, scale, scale, offset], dtype=_FOUR, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _multiply(acc, upper, lower, upper_on, lower_on, x, x_on, dtype: gl.constexpr):
    """acc + weight @ x.T of 16 inputs: a thread has four, of two rows of the weight, 8 apart, and of one of x."""
    return gl.inline_asm_elementwise(
        _MULTIPLY_BF16 if dtype == gl.bfloat16 else _MULTIPLY_F16, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [upper, lower, upper_on, lower_on, x, x_on, acc[0], acc[1], acc[2], acc[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _row_of_step(row, scales, zeros, step, quarter, blocks, outputs, ZEROS: gl.constexpr, WHOLE: gl.constexpr):
    """Of one output: a block of each half of a step, and what all of the step has of scales and zero points.

    Blocks beyond the last may be anything: they are multiplied by zeros.
    """
    known = step * _BLOCKS < blocks
    block = step * _BLOCKS + (0 if WHOLE else quarter)
    places = [
        (row + step * (_STEP // 2)).to(gl.int64),
        (block < blocks).to(gl.int32),
        (block + (0 if WHOLE else _BLOCKS // 2) < blocks).to(gl.int32),
    ]
    words = gl.inline_asm_elementwise(
        _WORDS, "=r,=r,=r,=r,=r,=r,=r,=r,l,r,r", places, dtype=_EIGHT, is_pure=False, pack=1
    )  # fmt: skip
    scale = gl.load(scales + step * outputs, mask=known, other=0)
    points = gl.load(zeros + step * outputs, mask=known, other=0) if ZEROS else scale
    return words, scale, points


@gluon.jit
def _step_of(rows, scales, zeros, step, quarter, blocks, outputs, ZEROS: gl.constexpr, WHOLE: gl.constexpr):
    """Of two outputs, 8 apart; as the only one of a tuple, like all that tuples are made of below."""
    upper = _row_of_step(rows[0], scales[0], zeros[0], step, quarter, blocks, outputs, ZEROS, WHOLE)
    lower = _row_of_step(rows[1], scales[1], zeros[1], step, quarter, blocks, outputs, ZEROS, WHOLE)
    return ((upper, lower),)


@gluon.jit
def _scale_of_bytes(bytes_of_step, selector, HALF: gl.constexpr):
    """Of a thread's block, in both halves of a word: 2^(byte - 127) times `FOLDED`, as bfloat16."""
    word = (bytes_of_step >> (32 * HALF)).to(gl.int32)
    return gl.inline_asm_elementwise(_SCALE, "=r,r,r", [word, selector], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _scale_of_halves(pair, kind: gl.constexpr, HALF: gl.constexpr):
    return (pair >> (16 * HALF)).to(gl.int16).to(kind, bitcast=True).to(gl.float32)


@gluon.jit
def _offset(pair, dtype: gl.constexpr, ZEROS: gl.constexpr, HALF: gl.constexpr):
    """In both halves of a word: what takes off the large number that codes are or-ed into, and the zero point."""
    large: gl.constexpr = 128 if dtype == gl.bfloat16 else 1024
    middle = pair * 0 + 8
    zero = (pair.to(gl.int32) >> (8 * HALF)) & 255 if ZEROS else middle
    bits = (-large - zero).to(gl.float32).to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def _wide_half(row, selector, HALF: gl.constexpr, dtype: gl.constexpr, E2M1: gl.constexpr, ZEROS: gl.constexpr):
    """A block of one row, widened: four times eight numbers."""
    if E2M1:
        scale = _scale_of_bytes(row[1], selector, HALF)
        offset = scale
    else:
        offset = _offset(row[2], dtype, ZEROS, HALF)
        scale = offset
    return (
        _numbers(row[0][4 * HALF], scale, offset, dtype, E2M1),
        _numbers(row[0][4 * HALF + 1], scale, offset, dtype, E2M1),
        _numbers(row[0][4 * HALF + 2], scale, offset, dtype, E2M1),
        _numbers(row[0][4 * HALF + 3], scale, offset, dtype, E2M1),
    )


@gluon.jit
def _no_sums(like):
    """Of a tile, by whole numbers that lie as its sums do."""
    zero = (like * 0).to(gl.float32)
    return ((zero, zero, zero, zero),)


@gluon.jit
def _sums(sums, upper, lower, x, dtype: gl.constexpr):
    """sums + weight @ x.T of 128 inputs."""
    for word in gl.static_range(0, 4, 2):
        for i in gl.static_range(4):
            sums = _multiply(
                sums, upper[word][i], lower[word][i], upper[word + 1][i], lower[word + 1][i], x[4 * i + word],
                x[4 * i + word + 1], dtype,
            )  # fmt: skip
    return sums


@gluon.jit
def _tile_sums(
    acc, upper, lower, wide_upper, wide_lower, x, HALF: gl.constexpr, dtype: gl.constexpr, E2M1: gl.constexpr,
    SCALE: gl.constexpr,
):  # fmt: skip
    """acc + weight @ x.T of 128 inputs. Scales of whole numbers multiply their sums, others multiplied the weights."""
    if E2M1:
        new = _sums(acc, wide_upper, wide_lower, x, dtype)
    else:
        sums = _sums(_no_sums(x[0])[0], wide_upper, wide_lower, x, dtype)
        upper_scale, lower_scale = _scale_of_halves(upper[1], SCALE, HALF), _scale_of_halves(lower[1], SCALE, HALF)
        new = (
            acc[0] + sums[0] * upper_scale,
            acc[1] + sums[1] * upper_scale,
            acc[2] + sums[2] * lower_scale,
            acc[3] + sums[3] * lower_scale,
        )
    return (new,)


@gluon.jit
def _half_step(
    acc, step, x_rows, block, is_known, selector, HALF: gl.constexpr, dtype: gl.constexpr, E2M1: gl.constexpr,
    ZEROS: gl.constexpr, SCALE: gl.constexpr, WHOLE: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """128 inputs of all tiles of rows."""
    upper, lower = step
    wide_upper = _wide_half(upper, selector, HALF, dtype, E2M1, ZEROS)
    wide_lower = _wide_half(lower, selector, HALF, dtype, E2M1, ZEROS)
    x = _words_of_x(x_rows[0] + block * 32, is_known, not WHOLE)
    new = _tile_sums(acc[0], upper, lower, wide_upper, wide_lower, x, HALF, dtype, E2M1, SCALE)
    for tile in gl.static_range(1, TILES):
        x = _words_of_x(x_rows[tile] + block * 32, is_known, not WHOLE)
        new += _tile_sums(acc[tile], upper, lower, wide_upper, wide_lower, x, HALF, dtype, E2M1, SCALE)
    return new


@gluon.jit
def _x_row(x, order, row, quarter, rows, pairs_a_row, inputs, GROUPED: gl.constexpr):
    """Where a thread reads of a row; of the first one, for rows that nobody has and nobody will write."""
    taken = gl.load(order + row) if GROUPED else row
    taken = gl.where(taken < rows, taken, 0) // pairs_a_row
    return (x + taken.to(gl.int64) * inputs + quarter * 32,)


@gluon.jit
def _write(
    four, bias, out, order, pair_weights, first_output, first_row, expert, rows, outputs, E2M1: gl.constexpr,
    HAS_BIAS: gl.constexpr, GROUPED: gl.constexpr, WEIGHED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """16 outputs of 8 rows: of each thread of a warp, two rows and two outputs, 8 apart."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2, 2], [32, 1, 1], [WARPS, 1, 1], [2, 1, 0])
    y = gl.convert_layout(four, layout)
    lane = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None][:, :, None]
    odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :][:, :, None]
    below = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :][:, None, :]
    row, output = first_row + lane % 4 * 2 + odd, first_output + lane // 4 + 8 * below
    if E2M1:
        y *= _UNFOLD
    if HAS_BIAS:
        y += gl.load(bias + expert * outputs + output, mask=output < outputs, other=0.0).to(gl.float32)
    if GROUPED:
        row = gl.load(order + row)
    if WEIGHED:
        y *= gl.load(pair_weights + row, mask=row < rows, other=0.0)
    inside = (output < outputs) & (row < rows)
    gl.store(out + row.to(gl.int64) * outputs + output, y.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["rows"])
def vector_four_bit(
    values, x, scales, zeros, bias, out, order, owner, pair_weights, rows, pairs_a_row, outputs, inputs,
    E2M1: gl.constexpr, ZEROS: gl.constexpr, SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, GROUPED: gl.constexpr,
    WEIGHED: gl.constexpr, WHOLE: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """16 outputs of x @ weight.T + bias; where GROUPED, of one expert's, whose rows of x lie anywhere.

    Warps take steps in turn, and each holds so many of them: the first are asked for before the kernel ahead has ended,
    since none writes to weights. WHOLE: the inputs are so many steps that all warps have the same number.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    dtype: gl.constexpr = x.dtype.element_ty
    cuda.gdc_launch_dependents()
    tile, row_tile = gl.program_id(0), gl.program_id(1)
    blocks = inputs // 32
    steps = gl.cdiv(blocks, _BLOCKS)
    none = gl.zeros([WARPS, 32], gl.int32, layout)
    first = none + gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    lane = none + gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    row, quarter = lane // 4, lane % 4
    upper = gl.minimum(tile * 16 + row, outputs - 1)
    lower = gl.minimum(tile * 16 + 8 + row, outputs - 1)
    expert = 0
    if GROUPED:
        cuda.gdc_wait()
        expert = gl.load(owner + row_tile).to(gl.int64)
        if expert < 0:
            return
        values += expert * outputs * (blocks * 16)
        scales += expert * outputs * steps
        if ZEROS:
            zeros += expert * outputs * steps
    row_bytes = blocks.to(gl.int64) * 16
    weight_rows = values + upper * row_bytes + quarter * 16, values + lower * row_bytes + quarter * 16
    scale_rows = scales + upper, scales + lower
    zero_rows = (zeros + upper, zeros + lower) if ZEROS else scale_rows
    held = _step_of(weight_rows, scale_rows, zero_rows, first, quarter, blocks, outputs, ZEROS, WHOLE)
    for i in gl.static_range(1, HELD):
        step = first + i * WARPS
        held += _step_of(weight_rows, scale_rows, zero_rows, step, quarter, blocks, outputs, ZEROS, WHOLE)
    if not GROUPED:
        cuda.gdc_wait()
    selector = quarter * 0x0101 + 0x4040
    row += row_tile * (8 * TILES)
    x_rows = _x_row(x, order, row, quarter, rows, pairs_a_row, inputs, GROUPED)
    acc = _no_sums(lane)
    for i in gl.static_range(1, TILES):
        x_rows += _x_row(x, order, row + 8 * i, quarter, rows, pairs_a_row, inputs, GROUPED)
        acc += _no_sums(lane)
    for start in range(0, steps, WARPS * HELD):
        for i in gl.static_range(HELD):
            step = first + start + i * WARPS
            for half in gl.static_range(2):
                block = step * _BLOCKS + half * (_BLOCKS // 2)
                is_known = block + quarter < blocks
                acc = _half_step(
                    acc, held[0], x_rows, block, is_known, selector, half, dtype, E2M1, ZEROS, SCALE, WHOLE, TILES
                )  # fmt: skip
            step += HELD * WARPS
            following = _step_of(weight_rows, scale_rows, zero_rows, step, quarter, blocks, outputs, ZEROS, WHOLE)
            held = held[1:] + following
    for i in gl.static_range(TILES):
        four = gl.join(gl.join(acc[i][0], acc[i][1]), gl.join(acc[i][2], acc[i][3]))
        _write(
            gl.sum(four, 0), bias, out, order, pair_weights, tile * 16, (row_tile * TILES + i) * 8, expert, rows,
            outputs, E2M1, HAS_BIAS, GROUPED, WEIGHED, WARPS,
        )  # fmt: skip


class Share(NamedTuple):
    """How the inputs of a tile are shared: the warps of a program, and the steps that each of them holds."""

    warps: int
    held: int


def share_of(inputs: int) -> Share:
    """All steps at once where they are few."""
    each = triton.cdiv(triton.cdiv(inputs, STEP), WARPS)
    return Share(WARPS, each if each <= MOST_AT_ONCE else HELD)


def takes(dtype: torch.dtype, weight: FourBitWeight) -> bool:
    """On a GPU that has the instructions, of whole numbers in groups of 128 and of e2m1 with a byte for each block."""
    device, scales = weight.values.device, weight.scales
    if device.type != "cuda" or not multiprocessors(device) or (weight.numbers, dtype) not in ASSEMBLY:
        return False
    if weight.columns % BLOCK or weight.factors is not None:
        return False
    if weight.numbers == "e2m1":
        return scales.dtype == torch.uint8 and weight.group == BLOCK
    return scales.dtype in (torch.float16, torch.bfloat16) and weight.group == STEP // 2


def _launch(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None, out: Tensor, share: Share, rows: int, tiles: int,
    row_tiles: int, order: Tensor | None, owner: Tensor | None, pair_weights: Tensor | None, pairs_a_row: int,
) -> None:  # fmt: skip
    outputs, inputs = weight.shape[-2:]
    in_e2m1 = weight.numbers == "e2m1"
    scales = weight.scales.view(torch.int64 if in_e2m1 else torch.int32)
    vector_four_bit[(triton.cdiv(outputs, OUTPUTS), row_tiles)](
        weight.values, x, scales, None if weight.zeros is None else weight.zeros.view(torch.int16), bias, out, order,
        owner, pair_weights, rows, pairs_a_row, outputs, inputs, E2M1=in_e2m1, ZEROS=weight.zeros is not None,
        SCALE=gl.bfloat16 if weight.scales.dtype == torch.bfloat16 else gl.float16, HAS_BIAS=bias is not None,
        GROUPED=order is not None, WEIGHED=pair_weights is not None,
        WHOLE=inputs % (STEP * share.warps * share.held) == 0, TILES=tiles, WARPS=share.warps, HELD=share.held,
        num_warps=share.warps, launch_pdl=True,
    )  # fmt: skip


def product(x: Tensor, weight: FourBitWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    out = x.new_empty(rows, outputs)
    tiles = triton.cdiv(rows, TILE_ROWS)
    _launch(x.contiguous(), weight, bias, out, share_of(inputs), rows, tiles, 1, None, None, None, 1)
    return out


def grouped_product(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None, order: Tensor, owner: Tensor, pairs_a_row: int,
    pair_weights: Tensor | None, pairs: int, tile_rows: int,
) -> Tensor:  # fmt: skip
    """out[pair] = x[pair // pairs_a_row] @ weight[expert].T + bias, or times its weight."""
    _, outputs, inputs = weight.shape
    out = x.new_empty(pairs, outputs)
    share, tiles = share_of(inputs), tile_rows // TILE_ROWS
    _launch(x, weight, bias, out, share, pairs, tiles, len(owner), order, owner, pair_weights, pairs_a_row)
    return out
