"""Products with weights of four bits: they stream through packed, and are widened where the tensor cores take them.

A step takes as many columns as share a scale, at most 128; where scales are powers of two, weights are scaled on the
way, which is exact, and it takes 128. Of each 32 columns the first 16 are in the low halves of 16 bytes, the others in
the high halves: each half of the bytes is multiplied with columns of x that lie together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.four_bit import BLOCK, FourBitWeight
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.gemm import LEAST_ROUNDS, Tile, counters, pick_tile
from phalanx.kernels.gpu.shared_memory import stages_here

MOST_STEP = 128
TILES = {
    16: Tile(16, 64, MOST_STEP, 4, 5, 792),
    32: Tile(32, 64, MOST_STEP, 4, 4, 660),
    64: Tile(64, 128, MOST_STEP, 4, 3, 396),
    128: Tile(128, 128, MOST_STEP, 8, 3, 264),
}
"""Where fewer columns share a scale, a step takes those. Not measured yet."""

GROUPED_TILES = {
    16: Tile(16, 64, MOST_STEP, 4, 5),
    32: Tile(32, 64, MOST_STEP, 4, 4),
    64: Tile(64, 128, MOST_STEP, 4, 3),
    128: Tile(128, 128, MOST_STEP, 8, 3),
}
MOST_ROWS = 256
"""Above these it is quicker to widen the weight once and leave the product to the library."""

WIDENED_AT_ONCE = 2048

INTERPRETED = bool(triton.knobs.runtime.interpret)

SPREAD = "prmt.b32 t, $2, 0, 0x4140; prmt.b32 w, $2, 0, 0x4342;"
"""Of four bytes two each, in the low halves of sixteen bits. All is read before anything is written."""


def _assembly(high: bool, e2m1: bool, bfloat: bool) -> str:
    """Four bytes in, the low or the high halves of them out, as four numbers of half precision.

    A whole number is or-ed into the mantissa of one so large that its last bit counts one, which is taken off again.
    Bits of e2m1 are put where a number of half precision has the same ones, and multiplied by what exponents differ.
    """
    kind = "bf16x2" if bfloat else "f16x2"
    if e2m1:
        mantissa, factor = (6, "0x7E807E80") if bfloat else (9, "0x74007400")
        mask = "0x01C001C0" if bfloat else "0x0E000E00"
        back = 4 if high else 0
        decode = (
            f"shl.b32 u, t, {mantissa - back}; and.b32 u, u, {mask}; shl.b32 v, t, {12 - back};"
            f"lop3.b32 u, v, 0x80008000, u, 0xEA; fma.rn.{kind} $OUT, u, {factor}, 0x80008000;"
        )
    else:
        large, one, less = (
            ("0x43004300", "0x3F803F80", "0xC308C308") if bfloat else ("0x64006400", "0x3C003C00", "0xE408E408")
        )
        decode = ("shr.u32 t, t, 4;" if high else "") + (
            f"lop3.b32 u, t, 0x000F000F, {large}, 0xEA; fma.rn.{kind} $OUT, u, {one}, {less};"
        )
    body = SPREAD + decode.replace("$OUT", "$0") + "mov.b32 t, w;" + decode.replace("$OUT", "$1")
    # fma takes registers alone: constants go there first
    names: dict[str, str] = {}
    for constant in ("0x7E807E80", "0x74007400", "0x3F803F80", "0x3C003C00", "0xC308C308", "0xE408E408"):
        if constant in body:
            names[constant] = f"c{len(names)}"
            body = body.replace(constant, names[constant])
    if e2m1:
        body, names["0x80008000"] = body.replace(", 0x80008000;", ", n;"), "n"
    declared = ", ".join(names.values())
    moves = "".join(f"mov.b32 {name}, {constant};" for constant, name in names.items())
    return f"{{ .reg .b32 t, u, v, w, {declared}; {moves} {body} }}"


INT4_LOW_BF16 = tl.constexpr(_assembly(False, False, True))
INT4_HIGH_BF16 = tl.constexpr(_assembly(True, False, True))
E2M1_LOW_BF16 = tl.constexpr(_assembly(False, True, True))
E2M1_HIGH_BF16 = tl.constexpr(_assembly(True, True, True))
INT4_LOW_F16 = tl.constexpr(_assembly(False, False, False))
INT4_HIGH_F16 = tl.constexpr(_assembly(True, False, False))
E2M1_LOW_F16 = tl.constexpr(_assembly(False, True, False))
E2M1_HIGH_F16 = tl.constexpr(_assembly(True, True, False))


@triton.jit
def _as_bf16(packed, TEXT: tl.constexpr):
    return tl.inline_asm_elementwise(TEXT, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _as_f16(packed, TEXT: tl.constexpr):
    return tl.inline_asm_elementwise(TEXT, "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def _by_arithmetic(packed, HIGH: tl.constexpr, E2M1: tl.constexpr):
    """The same as the assembly, in float32."""
    code = (packed >> 4 if HIGH else packed & 15).to(tl.int32)
    if E2M1:
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return (code - 8).to(tl.float32)


@triton.jit
def numbers(packed, HIGH: tl.constexpr, E2M1: tl.constexpr, ASSEMBLY: tl.constexpr, DTYPE: tl.constexpr):
    """The low or the high halves of bytes: whole numbers less 8, or e2m1."""
    if not ASSEMBLY:
        return _by_arithmetic(packed, HIGH, E2M1).to(DTYPE)
    if tl.bfloat16 == DTYPE:
        if E2M1:
            number = _as_bf16(packed, E2M1_HIGH_BF16 if HIGH else E2M1_LOW_BF16)
        else:
            number = _as_bf16(packed, INT4_HIGH_BF16 if HIGH else INT4_LOW_BF16)
    elif E2M1:
        number = _as_f16(packed, E2M1_HIGH_F16 if HIGH else E2M1_LOW_F16)
    else:
        number = _as_f16(packed, INT4_HIGH_F16 if HIGH else INT4_LOW_F16)
    return number


@triton.jit
def _scale(place, mask):
    """Bytes are powers of two, less 127."""
    scale = tl.load(place, mask=mask, other=0.0)
    if place.dtype.element_ty == tl.uint8:
        bits = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23)
        return bits.to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def four_bit_tile(
    x, row, known, values, scales, zeros, output, outputs, inputs, first, stop,
    E2M1: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, ASSEMBLY: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """weight[output] @ x[row].T over the inputs from `first` to `stop`, in float32, [OUTPUTS, ROWS]."""
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    byte = tl.arange(0, STEP // 2)
    column = byte // 16 * 32 + byte % 16
    wanted = output < outputs
    width, groups = tl.cdiv(inputs, 32) * 16, tl.cdiv(inputs, GROUP)
    value_row = values + output[:, None].to(tl.int64) * width + byte[None, :]
    x_row = x + row[None, :].to(tl.int64) * inputs + column[:, None]
    scale_row = scales + output.to(tl.int64) * groups
    for start in range(first, stop, STEP):
        inside = start // 2 + byte < width
        packed = tl.load(value_row + start // 2, mask=wanted[:, None] & inside[None, :], other=0)
        k = start + column
        low_x = tl.load(x_row + start, mask=known[None, :] & (k < inputs)[:, None], other=0.0)
        high_x = tl.load(x_row + start + 16, mask=known[None, :] & (k + 16 < inputs)[:, None], other=0.0)
        low = numbers(packed, False, E2M1, ASSEMBLY, dtype)
        high = numbers(packed, True, E2M1, ASSEMBLY, dtype)
        group = start // GROUP
        if GROUP >= 32 and STEP > GROUP:
            each = group + tl.arange(0, STEP // 32)
            scale = _scale(scale_row[:, None] + each[None, :], wanted[:, None] & (each < groups)[None, :]).to(dtype)
            spread = tl.broadcast_to(scale[:, :, None], [OUTPUTS, STEP // 32, 16]).reshape(OUTPUTS, STEP // 2)
            acc = tl.dot(high * spread, high_x, tl.dot(low * spread, low_x, acc))
        elif GROUP >= 32:
            if ZEROS:
                pair = tl.load(zeros + output.to(tl.int64) * tl.cdiv(groups, 2) + group // 2, mask=wanted, other=0)
                zero = (((pair.to(tl.int32) >> (group % 2 * 4)) & 15) - 8).to(dtype)[:, None]
                low, high = low - zero, high - zero
            acc += tl.dot(high, high_x, tl.dot(low, low_x)) * _scale(scale_row + group, wanted)[:, None]
        else:
            acc += tl.dot(low, low_x) * _scale(scale_row + group, wanted)[:, None]
            acc += tl.dot(high, high_x) * _scale(scale_row + group + 1, wanted & (group + 1 < groups))[:, None]
    return acc


@triton.jit(do_not_specialize=["rows", "splits"])
def _product(
    x, values, scales, zeros, factors, bias, out, partial, counter, rows, outputs, inputs, splits,
    E2M1: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, ASSEMBLY: tl.constexpr, HAS_FACTORS: tl.constexpr,
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
        E2M1, ZEROS, GROUP, ASSEMBLY, ROWS, OUTPUTS, STEP,
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


def step_of(weight: FourBitWeight, dtype: torch.dtype) -> int:
    """Columns of a step: those that share a scale, or part of them; more where the dtype holds all powers of two."""
    if weight.scales.dtype == torch.uint8 and weight.group == 32 and dtype != torch.float16:
        return MOST_STEP
    return max((step for step in (128, 64, 32) if weight.group % step == 0), default=BLOCK)


def _switches(weight: FourBitWeight, dtype: torch.dtype) -> dict[str, object]:
    return {
        "E2M1": weight.numbers == "e2m1",
        "ZEROS": weight.zeros is not None,
        "GROUP": weight.group,
        "ASSEMBLY": not INTERPRETED,
        "HAS_FACTORS": weight.factors is not None,
        "STEP": step_of(weight, dtype),
    }


def product(x: Tensor, weight: FourBitWeight, bias: Tensor | None) -> Tensor:
    if x.shape[0] > MOST_ROWS:
        return F.linear(x, widen(weight, x.dtype), bias)
    return run_tiles(x, weight, bias, pick_tile(TILES, x.shape[0]))


def run_tiles(x: Tensor, weight: FourBitWeight, bias: Tensor | None, tile: Tile) -> Tensor:
    rows, (outputs, inputs) = x.shape[0], weight.shape
    x, switches, step = x.contiguous(), _switches(weight, x.dtype), step_of(weight, x.dtype)
    out = x.new_empty(rows, outputs)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    rounds = triton.cdiv(inputs, step)
    least = max(1, LEAST_ROUNDS * MOST_STEP // step)
    splits = max(1, min(tile.programs // tiles, rounds // least))
    splits = triton.cdiv(rounds, triton.cdiv(rounds, splits))  # no share is empty
    partial = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device) if splits > 1 else None
    _product[(tiles, splits)](
        x, weight.values, weight.scales, weight.zeros, weight.factors, bias, out, partial, counters(x.device), rows,
        outputs, inputs, splits, **switches, HAS_BIAS=bias is not None, ROWS=tile.rows, OUTPUTS=tile.outputs,
        SPLIT=splits > 1, num_warps=tile.warps, num_stages=stages_here(tile.stages), launch_pdl=starts_early(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["pairs"])
def _grouped_product(
    x, values, scales, zeros, factors, bias, order, owner, pair_weights, out, pairs, pairs_a_row, outputs, inputs,
    E2M1: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, ASSEMBLY: tl.constexpr, HAS_FACTORS: tl.constexpr,
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
        groups, above = tl.cdiv(inputs, GROUP), expert * outputs
        acc = four_bit_tile(
            x, pair // pairs_a_row, known, values + above * (tl.cdiv(inputs, 32) * 16), scales + above * groups,
            zeros + above * tl.cdiv(groups, 2) if ZEROS else zeros, output, outputs, inputs, 0, inputs,
            E2M1, ZEROS, GROUP, ASSEMBLY, ROWS, OUTPUTS, STEP,
        )  # fmt: skip
        if HAS_FACTORS:
            acc *= tl.load(factors + above + output, mask=wanted, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias + above + output, mask=wanted, other=0.0).to(tl.float32)[:, None]
        if WEIGHED:
            acc *= tl.load(pair_weights + pair, mask=known, other=0.0)[None, :]
        place = pair[None, :].to(tl.int64) * outputs + output[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=wanted[:, None] & known[None, :])


def grouped_product(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None, order: Tensor, owner: Tensor, pairs_a_row: int,
    pair_weights: Tensor | None, pairs: int, tile: Tile,
) -> Tensor:  # fmt: skip
    _, outputs, inputs = weight.shape
    out = x.new_empty(pairs, outputs)
    _grouped_product[(triton.cdiv(outputs, tile.outputs), len(owner))](
        x, weight.values, weight.scales, weight.zeros, weight.factors, bias, order, owner, pair_weights, out, pairs,
        pairs_a_row, outputs, inputs, **_switches(weight, x.dtype), HAS_BIAS=bias is not None,
        WEIGHED=pair_weights is not None, ROWS=tile.rows, OUTPUTS=tile.outputs, num_warps=tile.warps,
        num_stages=stages_here(tile.stages), launch_pdl=starts_early(),
    )  # fmt: skip
    return out


@triton.jit
def _widen(
    values, scales, zeros, factors, out, inputs, E2M1: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr,
    ASSEMBLY: tl.constexpr, HAS_FACTORS: tl.constexpr, STEP: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Some bytes of one row."""
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    width, groups = tl.cdiv(inputs, 32) * 16, tl.cdiv(inputs, GROUP)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    column = byte // 16 * 32 + byte % 16
    packed = tl.load(values + row * width + byte, mask=byte < width, other=0)
    factor = tl.load(factors + row) if HAS_FACTORS else 1.0
    wait_for_ahead()
    for half in tl.static_range(2):
        k = column + 16 * half
        mask, group = k < inputs, k // GROUP
        number = _by_arithmetic(packed, half == 1, E2M1)
        if ZEROS:
            pair = tl.load(zeros + row * tl.cdiv(groups, 2) + group // 2, mask=mask, other=0).to(tl.int32)
            number -= (((pair >> (group % 2 * 4)) & 15) - 8).to(tl.float32)
        wide = number * (_scale(scales + row * groups + group, mask) * factor)
        tl.store(out + row * inputs + k, wide.to(out.dtype.element_ty), mask=mask)


def widen(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """What the weight stands for."""
    (*stack, inputs), rows = weight.shape, weight.shape[:-1].numel()
    out = torch.empty(*stack, inputs, dtype=dtype, device=weight.values.device)
    size = min(WIDENED_AT_ONCE, triton.next_power_of_2(weight.values.shape[-1]))
    _widen[(rows, triton.cdiv(weight.values.shape[-1], size))](
        weight.values, weight.scales, weight.zeros, weight.factors, out, inputs, **_switches(weight, dtype), BYTES=size,
        launch_pdl=starts_early(),
    )  # fmt: skip
    return out
