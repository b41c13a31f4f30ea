"""Products with weights of four bits: they stream through packed, and are widened where the tensor cores take them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.four_bit import FourBitWeight
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.four_bit_numbers import ASSEMBLY, FOLDED, UNFOLD
from phalanx.kernels.gpu.gemm import HAS_GLUON, LEAST_ROUNDS, Tile, counters, pick_tile, streamed_tile
from phalanx.kernels.gpu.shared_memory import stages_here

if HAS_GLUON:
    from phalanx.kernels.gpu import four_bit_persistent, four_bit_stream

STEP = 128
TILES = {
    16: Tile(16, 64, STEP, 4, 5, 792),
    32: Tile(32, 64, STEP, 4, 4, 660),
    64: Tile(64, 128, STEP, 4, 3, 396),
    128: Tile(128, 128, STEP, 8, 3, 264),
}
GROUPED_TILES = {
    16: Tile(16, 64, STEP, 4, 5),
    32: Tile(32, 64, STEP, 4, 4),
    64: Tile(64, 128, STEP, 4, 3),
    128: Tile(128, 128, STEP, 8, 3),
}
STREAMED_TILES = {most: streamed_tile(rows) for most, rows in ((8, 8), (16, 16), (64, 32), (128, 64), (256, 128))}
"""Of many rows, a second tile of some costs less than a larger one of all."""

MOST_ROWS = 256
"""Above these it is quicker to widen the weight once and leave the product to the library."""

WIDENED_AT_ONCE = 1024

INTERPRETED = bool(triton.knobs.runtime.interpret)

_INT4_BF16, _INT4_F16 = tl.constexpr(ASSEMBLY["int4", torch.bfloat16]), tl.constexpr(ASSEMBLY["int4", torch.float16])
_E2M1_BF16 = tl.constexpr(ASSEMBLY["e2m1", torch.bfloat16])
_FOLDED, _UNFOLD = tl.constexpr(FOLDED), tl.constexpr(UNFOLD)


@triton.jit
def _by_assembly(units, left_scale, right_scale, offset, E2M1: tl.constexpr):
    if left_scale.dtype == tl.float16:
        parts = tl.inline_asm_elementwise(
            _INT4_F16, "=r,=r,=r,=r,r,r,r,r", [units, left_scale, right_scale, offset],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        parts = tl.inline_asm_elementwise(
            _E2M1_BF16 if E2M1 else _INT4_BF16, "=r,=r,=r,=r,r,r,r,r", [units, left_scale, right_scale, offset],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return parts


@triton.jit
def _number(units, zero, QUARTER: tl.constexpr, E2M1: tl.constexpr):
    """Number QUARTER of each sixteen bits in float32, see `PLACES`: e2m1, or a whole number less its zero point."""
    bits = units.to(tl.int32)
    if E2M1:
        if QUARTER == 3:
            low, high = (bits >> 13) & 3 | (bits >> 8) & 4, bits >> 11
        else:
            low, high = bits >> (6 - 3 * QUARTER), bits >> (15 - 3 * QUARTER)
        number = ((low & 7) << 22) | ((high & 1) << 31)
        return number.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return ((bits >> (4 * QUARTER)) & 15).to(tl.float32) - zero


@triton.jit
def _scale(place, mask):
    """Bytes are powers of two, less 127."""
    scale = tl.load(place, mask=mask, other=0.0)
    if place.dtype.element_ty == tl.uint8:
        bits = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23)
        return bits.to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def _place(group, output, outputs, EACH: tl.constexpr):
    """Where the scale of a group of a row is."""
    return (group // EACH * outputs + output) * EACH + group % EACH


@triton.jit
def _spread(of_blocks, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr):
    """What blocks have, for each eight units of them."""
    return tl.broadcast_to(of_blocks[:, :, None], [OUTPUTS, BLOCKS, 8]).reshape(OUTPUTS, BLOCKS * 8)


@triton.jit
def four_bit_tile(
    x, row, known, values, scales, zeros, output, outputs, inputs, first, stop,
    E2M1: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, ASSEMBLED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """weight[output] @ x[row].T over the inputs from `first` to `stop`, in float32, [OUTPUTS, ROWS]."""
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    BLOCKS: tl.constexpr = STEP // 32
    unit, block = tl.arange(0, STEP // 4), tl.arange(0, BLOCKS)
    column = unit // 8 * 32 + unit % 8
    wanted = output < outputs
    width, groups = tl.cdiv(inputs, 32) * 8, tl.cdiv(inputs, GROUP)
    value_row = values + output[:, None].to(tl.int64) * width + unit[None, :]
    x_row = x + row[None, :].to(tl.int64) * inputs + column[:, None]
    for start in range(first, stop, STEP):
        inside = start // 4 + unit < width
        units = tl.load(value_row + start // 4, mask=wanted[:, None] & inside[None, :], other=0)
        left = (start + block * 32)[None, :] // GROUP
        right = (start + block * 32 + 16)[None, :] // GROUP
        left_place = _place(left, output[:, None], outputs, EACH)
        left_scale = _scale(scales + left_place, wanted[:, None] & (left < groups))
        right_scale = left_scale
        if GROUP < 32:
            right_place = _place(right, output[:, None], outputs, EACH)
            right_scale = _scale(scales + right_place, wanted[:, None] & (right < groups))
        zero = tl.full([OUTPUTS, BLOCKS], 8.0, tl.float32)
        if ZEROS:
            zero = tl.load(zeros + left_place, mask=wanted[:, None] & (left < groups), other=0).to(tl.float32)
        k = start + column[:, None]
        if ASSEMBLED:
            if E2M1:
                left_scale, right_scale = left_scale * _FOLDED, right_scale * _FOLDED
            left_all = _spread(left_scale.to(dtype), OUTPUTS, BLOCKS)
            right_all = _spread(right_scale.to(dtype), OUTPUTS, BLOCKS)
            large: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
            offset = _spread((-large - zero).to(dtype), OUTPUTS, BLOCKS)
            parts = _by_assembly(units, left_all, right_all, offset, E2M1)
        else:
            left_all, right_all = _spread(left_scale, OUTPUTS, BLOCKS), _spread(right_scale, OUTPUTS, BLOCKS)
            zero_all = _spread(zero, OUTPUTS, BLOCKS)
            parts = (
                (_number(units, zero_all, 0, E2M1) * left_all).to(dtype),
                (_number(units, zero_all, 1, E2M1) * left_all).to(dtype),
                (_number(units, zero_all, 2, E2M1) * right_all).to(dtype),
                (_number(units, zero_all, 3, E2M1) * right_all).to(dtype),
            )
        for quarter in tl.static_range(4):
            at = k + 8 * quarter
            taken = tl.load(x_row + start + 8 * quarter, mask=known[None, :] & (at < inputs), other=0.0)
            acc = tl.dot(parts[quarter], taken, acc)
    if ASSEMBLED and E2M1:
        acc *= _UNFOLD
    return acc


@triton.jit(do_not_specialize=["rows", "splits"])
def _product(
    x, values, scales, zeros, factors, bias, out, partial, counter, rows, outputs, inputs, splits,
    E2M1: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, ASSEMBLED: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile of x @ weight.T + bias. Programs that share a tile add up when the last of them is done."""
    let_next_start()
    tile, split = tl.program_id(0), tl.program_id(1)
    row_tiles = tl.cdiv(rows, ROWS)
    row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
    output = tile // row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    share = tl.cdiv(tl.cdiv(inputs, STEP), splits) * STEP
    first = split * share
    wait_for_ahead()
    acc = four_bit_tile(
        x, row, row < rows, values, scales, zeros, output, outputs, inputs, first, tl.minimum(first + share, inputs),
        E2M1, ZEROS, GROUP, EACH, ASSEMBLED, ROWS, OUTPUTS, STEP,
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
        if HAS_FACTORS:
            acc *= tl.load(factors + output, mask=output < outputs, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


def _switches(weight: FourBitWeight) -> dict[str, object]:
    return {
        "E2M1": weight.numbers == "e2m1",
        "ZEROS": weight.zeros is not None,
        "GROUP": weight.group,
        "EACH": weight.scales.shape[-1],
        "HAS_FACTORS": weight.factors is not None,
    }


def _assembled(weight: FourBitWeight, dtype: torch.dtype) -> bool:
    return not INTERPRETED and (weight.numbers, dtype) in ASSEMBLY


def product(x: Tensor, weight: FourBitWeight, bias: Tensor | None) -> Tensor:
    if x.shape[0] > MOST_ROWS:
        return F.linear(x, widen(weight, x.dtype), bias)
    if HAS_GLUON and four_bit_stream.streams(x.dtype, weight):
        way = four_bit_persistent if four_bit_persistent.stays(weight, len(x)) else four_bit_stream
        return way.product(x, weight, bias, counters(x.device))
    return run_tiles(x, weight, bias, pick_tile(TILES, x.shape[0]))


def units(weight: FourBitWeight) -> Tensor:
    """Its values by sixteen bits."""
    return weight.values.view(torch.int16)


def run_tiles(x: Tensor, weight: FourBitWeight, bias: Tensor | None, tile: Tile) -> Tensor:
    rows, (outputs, inputs) = x.shape[0], weight.shape
    x, switches = x.contiguous(), _switches(weight)
    out = x.new_empty(rows, outputs)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    rounds = triton.cdiv(inputs, tile.inputs)
    splits = max(1, min(tile.programs // tiles, rounds // LEAST_ROUNDS))
    splits = triton.cdiv(rounds, triton.cdiv(rounds, splits))  # no share is empty
    partial = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device) if splits > 1 else None
    _product[(tiles, splits)](
        x, units(weight), weight.scales, weight.zeros, weight.factors, bias, out, partial, counters(x.device), rows,
        outputs, inputs, splits, **switches, ASSEMBLED=_assembled(weight, x.dtype), HAS_BIAS=bias is not None,
        ROWS=tile.rows, OUTPUTS=tile.outputs, STEP=tile.inputs, SPLIT=splits > 1, num_warps=tile.warps,
        num_stages=stages_here(tile.stages), launch_pdl=starts_early(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["pairs"])
def _grouped_product(
    x, values, scales, zeros, factors, bias, order, owner, pair_weights, out, pairs, pairs_a_row, outputs, inputs,
    E2M1: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, ASSEMBLED: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr, WEIGHED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile of one expert: out[pair] = x[pair // pairs_a_row] @ weight[expert].T + bias, or times its weight."""
    let_next_start()
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tile = tl.program_id(1)
    wait_for_ahead()
    expert = tl.load(owner + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order + tile * ROWS + tl.arange(0, ROWS))
        known, wanted = pair < pairs, output < outputs
        above, held = expert * outputs, tl.cdiv(tl.cdiv(inputs, GROUP), EACH) * EACH
        acc = four_bit_tile(
            x, pair // pairs_a_row, known, values + above * (tl.cdiv(inputs, 32) * 8), scales + above * held,
            zeros + above * held if ZEROS else zeros, output, outputs, inputs, 0, inputs,
            E2M1, ZEROS, GROUP, EACH, ASSEMBLED, ROWS, OUTPUTS, STEP,
        )  # fmt: skip
        if HAS_FACTORS:
            acc *= tl.load(factors + above + output, mask=wanted, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias + above + output, mask=wanted, other=0.0).to(tl.float32)[:, None]
        if WEIGHED:
            acc *= tl.load(pair_weights + pair, mask=known, other=0.0)[None, :]
        place = pair[None, :].to(tl.int64) * outputs + output[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=wanted[:, None] & known[None, :])


def grouped_tiles(dtype: torch.dtype, *weights: FourBitWeight) -> dict[int, Tile]:
    """The tiles of experts, whose products are in such tiles or such."""
    streamed = HAS_GLUON and all(four_bit_stream.streams(dtype, weight) for weight in weights)
    return STREAMED_TILES if streamed else GROUPED_TILES


def grouped_product(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None, order: Tensor, owner: Tensor, pairs_a_row: int,
    pair_weights: Tensor | None, pairs: int, tile: Tile, placed: bool,
) -> Tensor:  # fmt: skip
    _, outputs, inputs = weight.shape
    if tile.streamed:
        stays = four_bit_persistent.experts_stay(weight, tile.rows, len(owner))
        return (four_bit_persistent if stays else four_bit_stream).grouped_product(
            x, weight, bias, order, owner, pairs_a_row, pair_weights, pairs, tile.rows, counters(x.device), placed
        )
    out = x.new_empty(pairs, outputs)
    _grouped_product[(triton.cdiv(outputs, tile.outputs), len(owner))](
        x, units(weight), weight.scales, weight.zeros, weight.factors, bias, order, owner, pair_weights, out, pairs,
        pairs_a_row, outputs, inputs, **_switches(weight), ASSEMBLED=_assembled(weight, x.dtype),
        HAS_BIAS=bias is not None, WEIGHED=pair_weights is not None, ROWS=tile.rows, OUTPUTS=tile.outputs,
        STEP=tile.inputs, num_warps=tile.warps, num_stages=stages_here(tile.stages), launch_pdl=starts_early(),
    )  # fmt: skip
    return out


@triton.jit
def _widen(
    values, scales, zeros, factors, out, outputs, inputs, E2M1: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr,
    EACH: tl.constexpr, HAS_FACTORS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Some units of one row."""
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    width, held = tl.cdiv(inputs, 32) * 8, tl.cdiv(tl.cdiv(inputs, GROUP), EACH) * EACH
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    packed = tl.load(values + row * width + unit, mask=unit < width, other=0)
    factor = tl.load(factors + row) if HAS_FACTORS else 1.0
    above = row // outputs * outputs * held
    wait_for_ahead()
    for quarter in tl.static_range(4):
        k = unit // 8 * 32 + unit % 8 + 8 * quarter
        mask = k < inputs
        place = above + _place(k // GROUP, row % outputs, outputs, EACH)
        zero = 8.0
        if ZEROS:
            zero = tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
        wide = _number(packed, zero, quarter, E2M1) * (_scale(scales + place, mask) * factor)
        tl.store(out + row * inputs + k, wide.to(out.dtype.element_ty), mask=mask)


def widen(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """What the weight stands for."""
    (*stack, outputs, inputs), rows, packed = weight.shape, weight.shape[:-1].numel(), units(weight)
    out = torch.empty(*stack, outputs, inputs, dtype=dtype, device=packed.device)
    size = min(WIDENED_AT_ONCE, triton.next_power_of_2(packed.shape[-1]))
    _widen[(rows, triton.cdiv(packed.shape[-1], size))](
        packed, weight.scales, weight.zeros, weight.factors, out, outputs, inputs, **_switches(weight),
        UNITS=size, launch_pdl=starts_early(),
    )  # fmt: skip
    return out
