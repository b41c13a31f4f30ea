"""Weights of four bits in the registers from which Hopper's tensor cores take them; Gluon, see `four_bit_stream`."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from phalanx.kernels.four_bit import STEP
from phalanx.kernels.gpu.four_bit_numbers import ASSEMBLY, FOLDED_SCALES, UNSCALED
from phalanx.kernels.gpu.stream import HAS_REINTERPRET

_STEP, _UNITS = gl.constexpr(STEP), gl.constexpr(STEP // 4)
_INT4_BF16, _INT4_F16 = gl.constexpr(ASSEMBLY["int4", torch.bfloat16]), gl.constexpr(ASSEMBLY["int4", torch.float16])
_E2M1_BF16 = gl.constexpr(ASSEMBLY["e2m1", torch.bfloat16])
_FOLDED_SCALES = gl.constexpr(FOLDED_SCALES)
_UNSCALED_BF16, _UNSCALED_F16 = (gl.constexpr(UNSCALED[dtype]) for dtype in (torch.bfloat16, torch.float16))


@gluon.constexpr_function
def dealt(warps: int, each: int) -> gl.DistributedLinearLayout:
    """How units [outputs, each, units / each] of half a step are dealt: a thread has of two rows, 8 apart, two units of
    each eight."""
    inner = STEP // 8 // each

    def unit(number: int) -> list[int]:
        return [0, 0, number] if number < inner else [0, number // inner, 0]

    return gl.DistributedLinearLayout(
        [unit(1), unit(8), unit(16), [8, 0, 0]],
        [unit(2), unit(4), [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16 << bit, 0, 0] for bit in range(warps.bit_length() - 1)],
        [],
        [16 * warps, each, inner],
    )


@gluon.constexpr_function
def dealt_rows(warps: int) -> gl.DistributedLinearLayout:
    """How one number a row, [outputs, 1], is dealt in the same way."""
    rows = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], rows, [], [16 * warps, 1])


@gluon.jit
def tile_of(memory, kind: gl.constexpr, OUTPUTS: gl.constexpr, EACH: gl.constexpr):
    """Bytes that were copied in one run, as a matrix."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if HAS_REINTERPRET:
        matrix = memory.reinterpret(kind, [OUTPUTS, EACH], layout)
    else:
        matrix = memory._reinterpret(kind, [OUTPUTS, EACH], layout)
    return matrix


@gluon.jit
def of_half(matrix, HALF: gl.constexpr, EACH: gl.constexpr):
    """What a half of a step has of a matrix [outputs, EACH]: half of the columns, or the only one."""
    if EACH > 1:
        matrix = matrix.slice(HALF * (EACH // 2), EACH // 2, 1)
    return matrix


@gluon.jit
def _assembled(packed, scales, offsets, TEXT: gl.constexpr):
    if offsets.dtype == gl.float16:
        parts = gl.inline_asm_elementwise(
            TEXT, "=r,=r,=r,=r,r,r,r,r", [packed, scales, scales, offsets],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        parts = gl.inline_asm_elementwise(
            TEXT, "=r,=r,=r,=r,r,r,r,r", [packed, scales, scales, offsets],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return parts


@gluon.jit
def widened(
    units, scale_tile, zero_tile, dtype: gl.constexpr, E2M1: gl.constexpr, ZEROS: gl.constexpr, SUMS: gl.constexpr,
    OUTPUTS: gl.constexpr, EACH: gl.constexpr, HALF: gl.constexpr, WARPS: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """Half a step of the weight, [OUTPUTS, STEP / 2], as the left operand of the tensor cores."""
    PARTS: gl.constexpr = EACH // 2 if EACH > 1 else 1
    INNER: gl.constexpr = _UNITS // 2 // PARTS
    spread: gl.constexpr = dealt(WARPS, PARTS)
    of_groups: gl.constexpr = gl.SliceLayout(2, spread)
    packed = units.slice(HALF * (_UNITS // 2), _UNITS // 2, 1).load(gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]] if WARPS == 4 else [[16, 0], [32, 0], [64, 0]], [], [OUTPUTS, _UNITS // 2],
    ))  # fmt: skip
    packed = gl.convert_layout(packed.reshape([OUTPUTS, PARTS, INNER]), spread, assert_trivial=True)
    large: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    if ZEROS:
        zero = of_half(zero_tile, HALF, EACH).load(of_groups).to(gl.float32)
        offset = (-large - zero).to(dtype)
    else:
        offset = gl.full([OUTPUTS, PARTS], -large - 8.0, dtype, of_groups)
    offsets = offset.expand_dims(2).broadcast_to([OUTPUTS, PARTS, INNER])
    if SUMS:
        WITHOUT: gl.constexpr = _UNSCALED_BF16 if dtype == gl.bfloat16 else _UNSCALED_F16
        first, second, third, fourth = _assembled(packed, offsets, offsets, WITHOUT)
    else:
        scale = of_half(scale_tile, HALF, EACH).load(of_groups)
        if E2M1:
            scale = gl.inline_asm_elementwise(
                _FOLDED_SCALES, "=&r,=r,r", [scale], dtype=gl.bfloat16, is_pure=True, pack=4
            )
        scales = scale.to(dtype).expand_dims(2).broadcast_to([OUTPUTS, PARTS, INNER])
        WITH: gl.constexpr = _E2M1_BF16 if E2M1 else (_INT4_BF16 if dtype == gl.bfloat16 else _INT4_F16)
        first, second, third, fourth = _assembled(packed, scales, offsets, WITH)
    quarters = gl.join(gl.join(first, second), gl.join(third, fourth))
    blocks = quarters.reshape([OUTPUTS, _STEP // 64, 8, 2, 2]).permute([0, 1, 4, 3, 2]).reshape([OUTPUTS, _STEP // 2])
    return gl.convert_layout(blocks, operand, assert_trivial=True)
