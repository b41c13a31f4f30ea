"""What a token leaves in a cache of latents, and products with a matrix for every head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.gemm import HAS_GLUON

if HAS_GLUON:
    from phalanx.kernels.gpu import latent_stream

FEW_ROWS = 128
"""Up to these, products by heads are the reading of matrices."""

NUMBERS_AT_ONCE = 16384
"""Of a matrix, that a program holds."""


@triton.jit(do_not_specialize_on_alignment=["write_to"])
def _keep_latents(
    entered, weight, cos, sin, write_to, cache, kept, stride, eps, RANK: tl.constexpr, ROPE: tl.constexpr,
    RANK_WIDE: tl.constexpr, HALF_WIDE: tl.constexpr,
):  # fmt: skip
    """One token: its latent normed, its key turned."""
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = ROPE // 2
    d, h = tl.arange(0, RANK_WIDE), tl.arange(0, HALF_WIDE)
    inside, known = d < RANK, h < half
    scale = tl.load(weight + d, mask=inside, other=0.0)
    wait_for_ahead()
    source = entered + token * stride
    latent = tl.load(source + d, mask=inside, other=0.0)
    wide = latent.to(tl.float32)
    latent = scale * (wide * tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps)).to(latent.dtype)
    low = tl.load(source + RANK + h, mask=known, other=0.0)
    high = tl.load(source + RANK + half + h, mask=known, other=0.0)
    at = token * ROPE + h
    low_cos, high_cos = tl.load(cos + at, mask=known, other=0.0), tl.load(cos + half + at, mask=known, other=0.0)
    low_sin, high_sin = tl.load(sin + at, mask=known, other=0.0), tl.load(sin + half + at, mask=known, other=0.0)
    turned_low = (low.to(tl.float32) * low_cos + high.to(tl.float32) * low_sin).to(low.dtype)
    turned_high = (high.to(tl.float32) * high_cos + low.to(tl.float32) * high_sin).to(low.dtype)
    entry = cache + tl.load(write_to + token) * (RANK + ROPE)
    tl.store(entry + d, latent, mask=inside)
    tl.store(entry + RANK + h, turned_low, mask=known)
    tl.store(entry + RANK + half + h, turned_high, mask=known)
    copy = kept + token * (RANK + ROPE)
    tl.store(copy + d, latent, mask=inside)
    tl.store(copy + RANK + h, turned_low, mask=known)
    tl.store(copy + RANK + half + h, turned_high, mask=known)


def keep_latents(
    entered: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, write_to: Tensor, cache: Tensor
) -> Tensor:
    tokens, rank = len(entered), len(weight)
    rope = entered.shape[1] - rank
    kept = entered.new_empty(tokens, rank + rope)
    _keep_latents[(tokens,)](
        entered, weight, cos, sin, write_to, cache, kept, entered.stride(0), eps, RANK=rank, ROPE=rope,
        RANK_WIDE=triton.next_power_of_2(rank), HALF_WIDE=triton.next_power_of_2(rope // 2), num_warps=2,
        launch_pdl=starts_early(),
    )  # fmt: skip
    return kept


@triton.jit(do_not_specialize=["rows"])
def _by_heads(
    x, matrices, out, rows, x_row, x_head, by_head, by_input, by_output, out_row, out_head,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS_WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some outputs of one head: its matrix is on its way before the kernel ahead has ended."""
    let_next_start()
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column, inner = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INPUTS_WIDE)
    place = head * by_head + inner[:, None] * by_input + column[None, :] * by_output
    matrix = tl.load(matrices + place, mask=(inner < INPUTS)[:, None] & (column < OUTPUTS)[None, :], other=0.0)
    wait_for_ahead()
    known = (row < rows)[:, None]
    token = row.to(tl.int64)[:, None]
    values = tl.load(x + token * x_row + head * x_head + inner, mask=known & (inner < INPUTS), other=0.0)
    made = tl.dot(values, matrix, input_precision="ieee").to(out.dtype.element_ty)
    tl.store(out + token * out_row + head * out_head + column, made, mask=known & (column < OUTPUTS))


def by_heads(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    if HAS_GLUON and latent_stream.multiplies(x, matrices, out):
        latent_stream.by_heads(x, matrices, out)
        return
    (rows, heads, inputs), outputs = x.shape, out.shape[2]
    wide = max(16, triton.next_power_of_2(inputs))
    columns = max(16, min(NUMBERS_AT_ONCE // wide, triton.next_power_of_2(outputs)))
    at_once = min(64, max(16, triton.next_power_of_2(rows)))
    _by_heads[(heads, triton.cdiv(outputs, columns), triton.cdiv(rows, at_once))](
        x, matrices, out, rows, *x.stride()[:2], *matrices.stride(), *out.stride()[:2], INPUTS=inputs, OUTPUTS=outputs,
        INPUTS_WIDE=wide, ROWS=at_once, COLUMNS=columns, num_warps=4, launch_pdl=starts_early(),
    )  # fmt: skip
