"""Kernels that take a row, or a head of a row, at a time: norms, gates, rotary embedding, FP8 activations."""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.cache import UNSCALED, CacheScales, HeadNorms
from phalanx.kernels.fp8 import E4M3, GROUP, LARGEST, Activations, Form, InBoth, Quantised
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.stamps import stamp_begin, taken
from phalanx.kernels.pairs import Unsummed
from phalanx.spec.ffn import Activation

COLUMNS_AT_ONCE = 1024
HEADS_AT_ONCE = {True: 8, False: 2}
"""Rotated whole, or in part: those are long, and a program of many would have to hold too much of them."""
FEW_TOKENS = 64
"""Of which programs with half the warps find room beside the kernel ahead."""


@triton.jit
def _store_quantised(out, out_scales, values, row, rows, first, width, WIDE: tl.constexpr, LARGEST: tl.constexpr):
    """A row's values from column `first` on, each group of 128 with a scale of its own."""
    groups = tl.reshape(values, (WIDE // 128, 128))
    scale = tl.maximum(tl.max(tl.abs(groups), 1), 1e-10) / LARGEST
    group, column = tl.arange(0, WIDE // 128), tl.arange(0, 128)
    place = first + group[:, None] * 128 + column[None, :]
    tl.store(out + row * width + place, (groups / scale[:, None]).to(out.dtype.element_ty), mask=place < width)
    tl.store(out_scales + (first // 128 + group).to(tl.int64) * rows + row, scale, mask=first + group * 128 < width)


def empty_quantised(rows: int, width: int, device: torch.device) -> Quantised:
    values = torch.empty(rows, width, dtype=E4M3, device=device)
    scales = torch.empty(-(-width // GROUP), rows, dtype=torch.float32, device=device)
    return Quantised(values, scales.t())


Places = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Where a kernel puts activations: as they are computed, in FP8, and the scales of that. What nobody takes is None."""


def empty_in(form: Form, x: Tensor, *shape: int) -> tuple[Activations, Places]:
    """Room for activations of this form and shape, numbers like those of x."""
    if form is Form.PLAIN:
        plain = x.new_empty(shape)
        return plain, (plain, None, None)
    in_fp8 = empty_quantised(prod(shape[:-1]), shape[-1], x.device)
    if form is Form.FP8:
        return in_fp8, (None, *in_fp8)
    plain = x.new_empty(shape)
    return InBoth(plain, in_fp8), (plain, *in_fp8)


@triton.jit(do_not_specialize=["rows"])
def _quantise(x, out, out_scales, rows, width, BLOCK: tl.constexpr, LARGEST: tl.constexpr):
    let_next_start()
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    wait_for_ahead()
    values = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    _store_quantised(out, out_scales, values, row, rows, first, width, BLOCK, LARGEST)


def quantise(x: Tensor) -> Quantised:
    rows, width = x.shape
    out = empty_quantised(rows, width, x.device)
    block = min(COLUMNS_AT_ONCE, max(GROUP, triton.next_power_of_2(width)))
    grid = (rows, triton.cdiv(width, block))
    _quantise[grid](x, *out, rows, width, BLOCK=block, LARGEST=LARGEST, launch_pdl=starts_early())
    return out


@triton.jit
def _sum_of_pairs(x, row, column, mask, width, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """A token is the sum of its pairs."""
    total = tl.zeros([BLOCK], tl.float32)
    for pair in tl.static_range(TOP):
        total += tl.load(x + (row * TOP + pair) * width + column, mask=mask, other=0.0).to(tl.float32)
    return total.to(x.dtype.element_ty)


@triton.jit
def _sum_pairs(x, beside, gate, out, width, TOP: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    wait_for_ahead()
    total = _sum_of_pairs(x, row, column, mask, width, TOP, BLOCK)
    if beside is not None:
        added = tl.load(beside + row * width + column, mask=mask, other=0.0)
        if gate is not None:
            opening = 1 / (1 + tl.exp(-tl.load(gate + row).to(tl.float32)))
            added *= opening.to(added.dtype)
        total += added
    tl.store(out + row * width + column, total, mask=mask)


def sum_pairs(pairs: Unsummed, beside: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """And what is beside them, a row a token, by the sigmoid of its gate if it has one."""
    (given, top), width = pairs, pairs.rows.shape[1]
    out = given.new_empty(len(given) // top, width)
    beside, gate = (None if each is None else each.contiguous() for each in (beside, gate))
    block = min(COLUMNS_AT_ONCE, triton.next_power_of_2(width))
    _sum_pairs[(len(out), triton.cdiv(width, block))](
        given, beside, gate, out, width, TOP=top, BLOCK=block, launch_pdl=starts_early()
    )
    return out


@triton.jit
def norm_factor(h, width, eps):
    """Of a row whose columns beyond `width` are zero."""
    wide = h.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)


@triton.jit
def norm_of(h, scale, width, eps):
    return (scale * (h.to(tl.float32) * norm_factor(h, width, eps)).to(scale.dtype)).to(h.dtype)


@triton.jit
def norm_and_store(
    h, scale, out, out_fp8, out_scales, row, rows, width, eps, BLOCK: tl.constexpr, LARGEST: tl.constexpr
):
    """A row's norm, as it is, in FP8, or both: where there is room. Columns of h beyond `width` are zero."""
    normed = norm_of(h, scale, width, eps)
    if out is not None:
        column = tl.arange(0, BLOCK)
        tl.store(out + row * width + column, normed, mask=column < width)
    if out_fp8 is not None:
        _store_quantised(out_fp8, out_scales, normed.to(tl.float32), row, rows, 0, width, BLOCK, LARGEST)


@triton.jit(do_not_specialize=["rows", "inner"])
def _add_rms_norm(
    x, residual, weight, out, out_fp8, out_scales, rows, stride, inner, width, eps, stamp,
    HAS_RESIDUAL: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Of one row, which with TOP is the sum of so many of x."""
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    scale = tl.load(weight + column, mask=mask, other=0.0)
    wait_for_ahead()
    place = (row // inner) * stride + (row % inner) * width + column
    h = _sum_of_pairs(x, row, column, mask, width, TOP, BLOCK) if TOP else tl.load(x + place, mask=mask, other=0.0)
    stamp_begin(stamp)
    if HAS_RESIDUAL:
        h += tl.load(residual + place, mask=mask, other=0.0)
        tl.store(residual + place, h, mask=mask)
    norm_and_store(h, scale, out, out_fp8, out_scales, row, rows, width, eps, BLOCK, LARGEST)


def add_rms_norm(
    x: Tensor | Unsummed, residual: Tensor | None, weight: Tensor, eps: float, form: Form = Form.PLAIN
) -> Activations:
    """x is [rows, width], or a slice of heads [tokens, heads, width] whose tokens may lie apart, or pairs."""
    given, top = x if isinstance(x, Unsummed) else (x, 0)
    width, inner = given.shape[-1], given.shape[1] if given.dim() == 3 else 1
    rows = given.numel() // width // (top or 1)
    out, places = empty_in(form, given, *((rows, width) if top else given.shape))
    _add_rms_norm[(rows,)](
        given, residual, weight, *places, rows, given.stride(0), inner, width, eps, taken(),
        HAS_RESIDUAL=residual is not None, TOP=top, BLOCK=max(GROUP, triton.next_power_of_2(width)), LARGEST=LARGEST,
        num_warps=warps_of_row(width, top), launch_pdl=starts_early(),
    )  # fmt: skip
    return out


def warps_of_row(width: int, top: int = 0) -> int:
    """Of a norm, which may sum up so many experts. Others sum up in another order."""
    return 8 if width > 2048 else 16 if top else 4


@triton.jit
def gated_product(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """In float32 but for the last product of SiLU and GELU."""
    if LIMIT is not None:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    wide = gate.to(tl.float32)
    if KIND == "clamped":
        return ((up.to(tl.float32) + 1) * (wide / (1 + tl.exp(-1.702 * wide)))).to(up.dtype)
    if KIND == "gelu":
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        return (wide / (1 + tl.exp(-2 * inner))).to(up.dtype) * up
    return (wide / (1 + tl.exp(-wide))).to(up.dtype) * up


@triton.jit(do_not_specialize=["rows"])
def _gate_and_mul(
    gate_up, out, out_scales, rows, width, KIND: tl.constexpr, LIMIT: tl.constexpr, QUANTISED: tl.constexpr,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    let_next_start()
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    mask = column < width
    wait_for_ahead()
    gate = tl.load(gate_up + row * 2 * width + column, mask=mask, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=mask, other=0.0)
    product = gated_product(gate, up, KIND, LIMIT)
    if QUANTISED:
        _store_quantised(out, out_scales, product.to(tl.float32), row, rows, first, width, BLOCK, LARGEST)
    else:
        tl.store(out + row * width + column, product, mask=mask)


def gate_and_mul(gate_up: Tensor, activation: Activation, quantised: bool = False) -> Tensor | Quantised:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_quantised(rows, width, gate_up.device) if quantised else gate_up.new_empty(rows, width)
    values, scales = out if isinstance(out, Quantised) else (out, None)
    _gate_and_mul[(rows, triton.cdiv(width, COLUMNS_AT_ONCE))](
        gate_up, values, scales, rows, width, activation.kind, activation.limit, quantised, COLUMNS_AT_ONCE, LARGEST,
        launch_pdl=starts_early(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _sigmoid_and_mul(
    x, gate, out, out_scales, rows, width, QUANTISED: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr
):
    let_next_start()
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    mask = column < width
    wait_for_ahead()
    value = tl.load(x + row * width + column, mask=mask, other=0.0)
    opening = 1 / (1 + tl.exp(-tl.load(gate + row * width + column, mask=mask, other=0.0).to(tl.float32)))
    product = value * opening.to(value.dtype)
    if QUANTISED:
        _store_quantised(out, out_scales, product.to(tl.float32), row, rows, first, width, BLOCK, LARGEST)
    else:
        tl.store(out + row * width + column, product, mask=mask)


def sigmoid_and_mul(x: Tensor, gate: Tensor, quantised: bool = False) -> Tensor | Quantised:
    rows, width = x.shape
    out = empty_quantised(rows, width, x.device) if quantised else torch.empty_like(x)
    values, scales = out if isinstance(out, Quantised) else (out, None)
    _sigmoid_and_mul[(rows, triton.cdiv(width, COLUMNS_AT_ONCE))](
        x, gate, values, scales, rows, width, quantised, COLUMNS_AT_ONCE, LARGEST, launch_pdl=starts_early()
    )
    return out


@triton.jit
def as_cached(x, inverse, cache, LARGEST: tl.constexpr):
    """Values as the cache holds them: in FP8 divided by their scale, and at most the largest."""
    if cache.dtype.element_ty.is_fp8():
        x = tl.clamp(x.to(tl.float32) * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(cache.dtype.element_ty)


@triton.jit
def _weights(query_norm, key_norm, d, known, is_query):
    """Of these dimensions, for query and key heads."""
    of_queries = tl.load(query_norm + d, mask=known, other=0.0)
    return tl.where(is_query, of_queries, tl.load(key_norm + d, mask=known, other=0.0))


@triton.jit
def _normed(x, shrink, weight, turns):
    """These dimensions of query and key heads by their norms' weights; values stay as they are."""
    return tl.where(turns, (weight * (x.to(tl.float32) * shrink).to(weight.dtype)).to(x.dtype), x)


@triton.jit
def _squares(x):
    wide = x.to(tl.float32)
    return wide * wide


@triton.jit(do_not_specialize_on_alignment=["write_to"])
def _rotate_and_store(
    qkv, cos, sin, write_to, cache, query_norm, key_norm, heads, kv_heads, eps, key_inverse, value_inverse,
    head_dim: tl.constexpr, rotary: tl.constexpr, NORMED: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Some heads of one token. A thread loads both halves of what it stores, so nothing is overwritten too early."""
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE))[:, None]
    half: tl.constexpr = rotary // 2
    d = tl.arange(0, HALF)[None, :]
    exists, turns = head < heads + 2 * kv_heads, head < heads + kv_heads
    mask = exists & (d < half)
    place = qkv + (token * (heads + 2 * kv_heads) + head) * head_dim
    at, known, is_query = token * rotary + d, d < half, head < heads
    if NORMED:
        low_weight = _weights(query_norm, key_norm, d, known, is_query)
        high_weight = _weights(query_norm, key_norm, half + d, known, is_query)
    if rotary < head_dim:
        r = rotary + tl.arange(0, REST)[None, :]
        behind = r < head_dim
        if NORMED:
            rest_weight = _weights(query_norm, key_norm, r, behind, is_query)
    wait_for_ahead()
    slot = tl.load(write_to + token)
    low_cos, high_cos = tl.load(cos + at, mask=known, other=1.0), tl.load(cos + half + at, mask=known, other=1.0)
    low_sin, high_sin = tl.load(sin + at, mask=known, other=0.0), tl.load(sin + half + at, mask=known, other=0.0)
    low = tl.load(place + d, mask=mask, other=0.0)
    high = tl.load(place + half + d, mask=mask, other=0.0)
    if rotary < head_dim:
        rest = tl.load(place + r, mask=exists & behind, other=0.0)
    if NORMED:
        squares = tl.sum(_squares(low) + _squares(high), 1)
        if rotary < head_dim:
            squares += tl.sum(_squares(rest), 1)
        shrink = tl.rsqrt(squares / head_dim + eps)[:, None]
        low, high = _normed(low, shrink, low_weight, turns), _normed(high, shrink, high_weight, turns)
        if rotary < head_dim:
            rest = _normed(rest, shrink, rest_weight, turns)
            tl.store(place + r, rest, mask=exists & behind & turns)
    turned_low = low.to(tl.float32) * low_cos + high.to(tl.float32) * low_sin
    turned_high = high.to(tl.float32) * high_cos + low.to(tl.float32) * high_sin
    low = tl.where(turns, turned_low.to(low.dtype), low)
    high = tl.where(turns, turned_high.to(high.dtype), high)
    tl.store(place + d, low, mask=mask & turns)
    tl.store(place + half + d, high, mask=mask & turns)
    entry = cache + (slot * 2 * kv_heads + head - heads) * head_dim
    kept = exists & (head >= heads)
    inverse = tl.where(turns, key_inverse, value_inverse)
    tl.store(entry + d, as_cached(low, inverse, cache, LARGEST), mask=mask & kept)
    tl.store(entry + half + d, as_cached(high, inverse, cache, LARGEST), mask=mask & kept)
    if rotary < head_dim:
        tl.store(entry + r, as_cached(rest, inverse, cache, LARGEST), mask=kept & behind)


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_to: Tensor,
    cache: Tensor,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None = None,
    scales: CacheScales = UNSCALED,
    steady: bool = False,
) -> None:
    """More warps sum up in another order: `steady` keeps to one number of them."""
    tokens, all_heads, head_dim = qkv.shape
    rotary = cos.shape[-1]
    query_norm, key_norm, eps = norms or (None, None, 0.0)
    at_once = HEADS_AT_ONCE[rotary == head_dim]
    _rotate_and_store[(tokens, triton.cdiv(all_heads, at_once))](
        qkv, cos, sin, write_to, cache, query_norm, key_norm, heads, kv_heads, eps, 1 / scales.key,
        1 / scales.value, head_dim, rotary, NORMED=norms is not None, HEADS_AT_ONCE=at_once,
        HALF=triton.next_power_of_2(rotary // 2), REST=triton.next_power_of_2(max(head_dim - rotary, 1)),
        LARGEST=LARGEST, num_warps=2 if steady or tokens <= FEW_TOKENS else 4, launch_pdl=starts_early(),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _cos_and_sin(positions, frequencies, cos, sin, factor, half: tl.constexpr, HALF: tl.constexpr):
    """One token: a whole row of cos and one of sin."""
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    known = pair < half
    wait_for_ahead()
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + pair, mask=known, other=0.0)
    near, far = tl.cos(angle) * factor, tl.sin(angle) * factor
    low, high = token * 2 * half + pair, token * 2 * half + half + pair
    tl.store(cos + low, near.to(cos.dtype.element_ty), mask=known)
    tl.store(cos + high, near.to(cos.dtype.element_ty), mask=known)
    tl.store(sin + low, (-far).to(sin.dtype.element_ty), mask=known)
    tl.store(sin + high, far.to(sin.dtype.element_ty), mask=known)


def cos_and_sin(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = frequencies.shape[0]
    cos, sin = torch.empty(2, positions.shape[0], 1, 2 * half, dtype=dtype, device=positions.device).unbind()
    _cos_and_sin[(positions.shape[0],)](
        positions,
        frequencies,
        cos,
        sin,
        factor,
        half,
        triton.next_power_of_2(half),
        num_warps=1,
        launch_pdl=starts_early(),
    )
    return cos, sin
