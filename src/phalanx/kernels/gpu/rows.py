"""Kernels that take a row, or a head of a row, at a time: norms, gates, rotary embedding, FP8 activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from phalanx.kernels.fp8 import E4M3, GROUP, LARGEST, Quantised
from phalanx.kernels.rotary import HeadNorms

COLUMNS_AT_ONCE = 1024


@triton.jit
def _store_quantised(out, out_scales, values, row, rows, first, width, WIDE: tl.constexpr, LARGEST: tl.constexpr):
    """A row's values from column `first` on, each group of 128 with a scale of its own."""
    groups = tl.reshape(values, (WIDE // 128, 128))
    scale = tl.maximum(tl.max(tl.abs(groups), 1), 1e-10) / LARGEST
    group, column = tl.arange(0, WIDE // 128), tl.arange(0, 128)
    place = first + group[:, None] * 128 + column[None, :]
    tl.store(out + row * width + place, (groups / scale[:, None]).to(out.dtype.element_ty), mask=place < width)
    tl.store(out_scales + (first // 128 + group).to(tl.int64) * rows + row, scale, mask=first + group * 128 < width)


def _empty_quantised(rows: int, width: int, device: torch.device) -> Quantised:
    values = torch.empty(rows, width, dtype=E4M3, device=device)
    scales = torch.empty(-(-width // GROUP), rows, dtype=torch.float32, device=device)
    return Quantised(values, scales.t())


@triton.jit
def _quantise(x, out, out_scales, rows, width, BLOCK: tl.constexpr, LARGEST: tl.constexpr):
    cuda.gdc_launch_dependents()
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    cuda.gdc_wait()
    values = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    _store_quantised(out, out_scales, values, row, rows, first, width, BLOCK, LARGEST)


def quantise(x: Tensor) -> Quantised:
    rows, width = x.shape
    out = _empty_quantised(rows, width, x.device)
    block = min(COLUMNS_AT_ONCE, max(GROUP, triton.next_power_of_2(width)))
    grid = (rows, triton.cdiv(width, block))
    _quantise[grid](x, *out, rows, width, BLOCK=block, LARGEST=LARGEST, launch_pdl=True)
    return out


@triton.jit
def _add_rms_norm(
    x, residual, weight, out, out_scales, rows, stride, inner, width, eps,
    HAS_RESIDUAL: tl.constexpr, QUANTISED: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    scale = tl.load(weight + column, mask=mask, other=0.0)
    cuda.gdc_wait()
    place = (row // inner) * stride + (row % inner) * width + column
    h = tl.load(x + place, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        h += tl.load(residual + place, mask=mask, other=0.0)
        tl.store(residual + place, h, mask=mask)
    wide = h.to(tl.float32)
    normed = scale * (wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)).to(h.dtype)
    if QUANTISED:
        _store_quantised(out, out_scales, normed.to(tl.float32), row, rows, 0, width, BLOCK, LARGEST)
    else:
        tl.store(out + row * width + column, normed, mask=mask)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, quantised: bool = False
) -> Tensor | Quantised:
    """x is [rows, width], or a slice of heads [tokens, heads, width] whose tokens may lie apart."""
    width, inner = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    rows = x.numel() // width
    out = _empty_quantised(rows, width, x.device) if quantised else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    values, scales = out if isinstance(out, Quantised) else (out, None)
    _add_rms_norm[(rows,)](
        x, residual, weight, values, scales, rows, x.stride(0), inner, width, eps,
        HAS_RESIDUAL=residual is not None, QUANTISED=quantised,
        BLOCK=max(GROUP, triton.next_power_of_2(width)), LARGEST=LARGEST,
        num_warps=8 if width > 2048 else 4, launch_pdl=True,
    )  # fmt: skip
    return out


@triton.jit
def _silu_and_mul(
    gate_up, out, out_scales, rows, width, QUANTISED: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr
):
    cuda.gdc_launch_dependents()
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    mask = column < width
    cuda.gdc_wait()
    gate = tl.load(gate_up + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=mask, other=0.0)
    product = (gate / (1 + tl.exp(-gate))).to(up.dtype) * up
    if QUANTISED:
        _store_quantised(out, out_scales, product.to(tl.float32), row, rows, first, width, BLOCK, LARGEST)
    else:
        tl.store(out + row * width + column, product, mask=mask)


def silu_and_mul(gate_up: Tensor, quantised: bool = False) -> Tensor | Quantised:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = _empty_quantised(rows, width, gate_up.device) if quantised else gate_up.new_empty(rows, width)
    values, scales = out if isinstance(out, Quantised) else (out, None)
    _silu_and_mul[(rows, triton.cdiv(width, COLUMNS_AT_ONCE))](
        gate_up, values, scales, rows, width, quantised, COLUMNS_AT_ONCE, LARGEST, launch_pdl=True
    )
    return out


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, write_to, cache, query_norm, key_norm, heads, kv_heads, head_dim, rotary, eps,
    NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One warp a head, so that every partner is loaded before anything is stored."""
    cuda.gdc_launch_dependents()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask, half = d < head_dim, rotary // 2
    place = qkv + (token * (heads + 2 * kv_heads) + head) * head_dim
    cuda.gdc_wait()
    value = tl.load(place + d, mask=mask, other=0.0)
    if head < heads + kv_heads:
        partner = tl.where(d < half, d + half, tl.where(d < rotary, d - half, d))
        other = tl.load(place + partner, mask=mask, other=0.0)
        if NORMED:
            weight = query_norm if head < heads else key_norm
            wide = value.to(tl.float32)
            shrink = tl.rsqrt(tl.sum(wide * wide, 0) / head_dim + eps)
            value = tl.load(weight + d, mask=mask, other=0.0) * (wide * shrink).to(value.dtype)
            other = tl.load(weight + partner, mask=mask, other=0.0) * (other.to(tl.float32) * shrink).to(value.dtype)
        c = tl.load(cos + token * rotary + d, mask=d < rotary, other=1.0)
        s = tl.load(sin + token * rotary + d, mask=d < rotary, other=0.0)
        value = (value.to(tl.float32) * c + other.to(tl.float32) * s).to(value.dtype)
        tl.store(place + d, value, mask=mask)
    if head >= heads:
        entry = tl.load(write_to + token) * 2 * kv_heads + head - heads
        tl.store(cache + entry * head_dim + d, value, mask=mask)


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_to: Tensor,
    cache: Tensor,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None = None,
) -> None:
    tokens, all_heads, head_dim = qkv.shape
    query_norm, key_norm, eps = norms or (None, None, 0.0)
    _rotate_and_store[(tokens, all_heads)](
        qkv, cos, sin, write_to, cache, query_norm, key_norm, heads, kv_heads, head_dim, cos.shape[-1], eps,
        NORMED=norms is not None, BLOCK=triton.next_power_of_2(head_dim), num_warps=1, launch_pdl=True,
    )  # fmt: skip
