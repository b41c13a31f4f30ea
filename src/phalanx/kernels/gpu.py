"""Triton kernels for CUDA. Each computes what the torch function of the same name in this folder defines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT_TARGET = 264
"""Programs that fill a large GPU twice: decode attention is split over the sequence until there are about this many."""

MOST_SPLITS = 32
TOKENS_AT_ONCE = 128
COLUMNS_AT_ONCE = 1024
VECTOR_TILE = (4, 2048)
"""Outputs and inputs that one program of a matrix-vector product takes at once."""


@triton.jit
def _add_rms_norm(x, residual, weight, out, stride, inner, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    place = (row // inner) * stride + (row % inner) * width + column
    h = tl.load(x + place, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        h += tl.load(residual + place, mask=mask, other=0.0)
        tl.store(residual + place, h, mask=mask)
    wide = h.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    scale = tl.load(weight + column, mask=mask, other=0.0)
    tl.store(out + row * width + column, scale * normed.to(h.dtype), mask=mask)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x is [rows, width], or a slice of heads [tokens, heads, width] whose tokens may lie apart."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width, inner = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    rows = x.numel() // width
    _add_rms_norm[(rows,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        inner,
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8 if width > 2048 else 4,
    )
    return out


@triton.jit
def _silu_and_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=mask)
    tl.store(out + row * width + column, (gate / (1 + tl.exp(-gate))).to(up.dtype) * up, mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _silu_and_mul[(rows, triton.cdiv(width, COLUMNS_AT_ONCE))](gate_up, out, width, BLOCK=COLUMNS_AT_ONCE)
    return out


@triton.jit
def _matrix_vector(
    x, weight, bias, out, inputs, outputs, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    start_of_row = weight + row[:, None].to(tl.int64) * inputs
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK):
        inside = start + column < inputs
        vector = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
        mask = (row[:, None] < outputs) & inside
        acc += vector * tl.load(start_of_row + start + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=row < outputs)


def matrix_vector(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear for one row: the weight streams through once, nearer to memory speed than the library's product."""
    (outputs, inputs), (rows, block) = weight.shape, VECTOR_TILE
    out = x.new_empty(1, outputs)
    _matrix_vector[(triton.cdiv(outputs, rows),)](
        x, weight, bias, out, inputs, outputs, bias is not None, rows, min(block, triton.next_power_of_2(inputs))
    )
    return out


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, write_to, cache, heads, kv_heads, head_dim, rotary, BLOCK: tl.constexpr
):  # one warp a head, so that every partner is loaded before anything is stored
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask, half = d < head_dim, rotary // 2
    place = qkv + (token * (heads + 2 * kv_heads) + head) * head_dim
    value = tl.load(place + d, mask=mask)
    if head < heads + kv_heads:
        partner = tl.where(d < half, d + half, tl.where(d < rotary, d - half, d))
        other = tl.load(place + partner, mask=mask)
        c = tl.load(cos + token * rotary + d, mask=d < rotary, other=1.0)
        s = tl.load(sin + token * rotary + d, mask=d < rotary, other=0.0)
        value = (value.to(tl.float32) * c + other.to(tl.float32) * s).to(value.dtype)
        tl.store(place + d, value, mask=mask)
    if head >= heads:
        entry = tl.load(write_to + token) * 2 * kv_heads + head - heads
        tl.store(cache + entry * head_dim + d, value, mask=mask)


def rotate_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, write_to: Tensor, cache: Tensor, heads: int, kv_heads: int
) -> None:
    tokens, all_heads, head_dim = qkv.shape
    block = triton.next_power_of_2(head_dim)
    _rotate_and_store[(tokens, all_heads)](
        qkv, cos, sin, write_to, cache, heads, kv_heads, head_dim, cos.shape[-1], BLOCK=block, num_warps=1
    )


@triton.jit
def _attend_split(
    q, cache, table, positions, partial, peaks, totals, q_stride, table_width, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One stretch of one sequence for the query heads of one KV head: a partial sum with its peak and total."""
    row, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    g, d = tl.arange(0, GROUP), tl.arange(0, DIM)
    known, inside = g[:, None] < group, d < HEAD_DIM
    head = kv * group + g
    queries = tl.load(q + row * q_stride + head[:, None] * HEAD_DIM + d, mask=known & inside, other=0.0)
    last = tl.load(positions + row)
    first = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    share = tl.cdiv(tl.cdiv(last + 1 - first, TOKENS), SPLITS) * TOKENS
    start = first + split * share
    stop = tl.minimum(start + share, last + 1)
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, DIM], tl.float32)
    for at in range(start, stop, TOKENS):
        position = at + tl.arange(0, TOKENS)
        seen = position < stop
        page = tl.load(table + row.to(tl.int64) * table_width + position // PAGE, mask=seen, other=0)
        entry = (page * PAGE + position % PAGE) * 2 * KV_HEADS + kv
        keys = tl.load(cache + entry[None, :] * HEAD_DIM + d[:, None], mask=seen[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - top[:, None])
        shrink = tl.exp(peak - top)
        total = total * shrink + tl.sum(weights, 1)
        spot = (entry + KV_HEADS)[:, None] * HEAD_DIM + d
        values = tl.load(cache + spot, mask=seen[:, None] & inside, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        peak = top
    place = (row * HEADS + head) * SPLITS + split
    tl.store(peaks + place, peak, mask=g < group)
    tl.store(totals + place, total, mask=g < group)
    tl.store(partial + place[:, None] * HEAD_DIM + d, acc, mask=known & inside)


@triton.jit
def _join_splits(partial, peaks, totals, out, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, DIM: tl.constexpr):
    """The partial sums of one query head, each brought to the common peak."""
    place = tl.program_id(0)
    s, d = tl.arange(0, SPLITS), tl.arange(0, DIM)
    peak = tl.load(peaks + place * SPLITS + s)
    shrink = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(totals + place * SPLITS + s) * shrink, 0)
    where = (place * SPLITS + s)[:, None] * HEAD_DIM + d
    parts = tl.load(partial + where, mask=(d < HEAD_DIM)[None, :], other=0.0)
    joined = tl.sum(parts * shrink[:, None], 0) / total
    tl.store(out + place * HEAD_DIM + d, joined.to(out.dtype.element_ty), mask=d < HEAD_DIM)


def decode_attention(
    q: Tensor, cache: Tensor, table: Tensor, positions: Tensor, window: int | None, scale: float, out: Tensor
) -> None:
    """Split over the sequence when few sequences leave the GPU idle; nothing here depends on lengths on the host."""
    (rows, heads, head_dim), (_, page, _, kv_heads, _) = q.shape, cache.shape
    splits = triton.next_power_of_2(max(1, min(MOST_SPLITS, SPLIT_TARGET // (rows * kv_heads))))
    partial = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=q.device)
    peaks, totals = (torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    dim = max(16, triton.next_power_of_2(head_dim))
    _attend_split[(rows, kv_heads, splits)](
        q, cache, table, positions, partial, peaks, totals, q.stride(0), table.shape[1], window or 0, scale,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE=page, SPLITS=splits,
        GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), DIM=dim, TOKENS=TOKENS_AT_ONCE,
    )  # fmt: skip
    _join_splits[(rows * heads,)](partial, peaks, totals, out, HEAD_DIM=head_dim, SPLITS=splits, DIM=dim)
