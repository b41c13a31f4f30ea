"""What kernels of gated delta nets share, whether they take tokens one by one or in chunks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.delta_weights import DeltaWeights
from phalanx.kernels.fp8 import LARGEST, Quantised
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.tiling import PROMPT_TILE

ROWS_AT_ONCE = 32


@triton.jit
def tile_at(tiles, number):
    """Place, first row, rows, first position, and where this step began the sequence."""
    tile = tiles + number * 5
    place, first, begins = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64), tl.load(tile + 4)
    return place, first, tl.load(tile + 2), tl.load(tile + 3), begins


@triton.jit
def silu(total, dtype: tl.constexpr):
    """Of a sum as the model's dtype holds it, in that dtype."""
    narrow = total.to(dtype).to(tl.float32)
    return (narrow / (1 + tl.exp(-narrow))).to(dtype)


@triton.jit
def length_factor(x, axis: tl.constexpr):
    """What brings vectors along this axis to length 1."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis) + 1e-6)


@triton.jit
def rates_of(rates, decays, decay_bias, row, head, known, V_HEADS: tl.constexpr):
    """The logarithm of what tokens leave of a head's state, and how far they correct it; where unknown, nothing."""
    place = rates + row * (2 * V_HEADS) + head
    fast = tl.load(place, mask=known, other=0.0)
    slow = tl.load(place + V_HEADS, mask=known, other=0.0).to(tl.float32) + tl.load(decay_bias + head)
    grown = tl.exp(tl.minimum(slow, 20.0))
    soft = tl.where(grown < 1e-3, grown - grown * grown / 2, tl.log(1 + grown))
    decay = -tl.exp(tl.load(decays + head)) * tl.where(slow > 20.0, slow, soft)
    beta = (1 / (1 + tl.exp(-fast.to(tl.float32)))).to(fast.dtype).to(tl.float32)
    return tl.where(known, decay, 0.0), tl.where(known, beta, 0.0)


@triton.jit
def updated(state, entry, i, j, some_k, some_v, K_DIM: tl.constexpr, V_DIM: tl.constexpr):
    """Rows `i` and columns `j` of a state, once an update that was pending is made."""
    k = tl.load(entry + i, mask=some_k, other=0.0)
    moved = tl.load(entry + K_DIM + j, mask=some_v, other=0.0)
    return state * tl.exp(tl.load(entry + K_DIM + V_DIM)) + k[:, None] * moved[None, :]


@triton.jit
def gate_and_store(
    read, gate, norm, out, out_scales, row, known, rows, head, eps,
    V_HEADS: tl.constexpr, V_DIM: tl.constexpr, QUANTISED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Rows of one value head, [rows, columns], normed and gated; columns beyond `V_DIM` are zero.

    In FP8 a head has one scale.
    """
    j = tl.arange(0, read.shape[1])
    wide = read.to(gate.dtype).to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / V_DIM + eps)
    weight = tl.load(norm + j, mask=j < V_DIM, other=0.0)
    normed = (weight[None, :] * (wide * factor[:, None]).to(gate.dtype)).to(tl.float32)
    opened = gate.to(tl.float32)
    gated = (normed * (opened / (1 + tl.exp(-opened)))).to(gate.dtype)
    place = out + row[:, None] * (V_HEADS * V_DIM) + head * V_DIM + j[None, :]
    mask = known[:, None] & (j < V_DIM)[None, :]
    if QUANTISED:
        scale = tl.maximum(tl.max(tl.abs(gated.to(tl.float32)), 1), 1e-10) / LARGEST
        tl.store(place, (gated.to(tl.float32) / scale[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(out_scales + head.to(tl.int64) * rows + row, scale, mask=known)
    else:
        tl.store(place, gated, mask=mask)


@triton.jit(do_not_specialize=["tokens", "count"])
def _gate(
    read, qkvz, norm, tiles, out, out_scales, count, tokens, stride, eps, CHANNELS: tl.constexpr, V_HEADS: tl.constexpr,
    V_DIM: tl.constexpr, V: tl.constexpr, TILED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    QUANTISED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Some rows of one value head: of a tile, or of `count`."""
    let_next_start()
    head, part = tl.program_id(0), tl.program_id(1)
    if TILED:
        part = part % PARTS
    r, j = part * ROWS + tl.arange(0, ROWS), tl.arange(0, V)
    wait_for_ahead()
    first = tl.zeros([], tl.int64)
    if TILED:
        _, first, count, _, _ = tile_at(tiles, tl.program_id(1) // PARTS)
    if part * ROWS >= count:
        return
    row, known = first + r, r < count
    mask = known[:, None] & (j < V_DIM)[None, :]
    values = tl.load(read + (row * V_HEADS + head)[:, None] * V_DIM + j[None, :], mask=mask, other=0.0)
    gates = tl.load(qkvz + row[:, None] * stride + CHANNELS + head * V_DIM + j[None, :], mask=mask, other=0.0)
    gate_and_store(
        values, gates, norm, out, out_scales, row, known, tokens, head, eps, V_HEADS, V_DIM, QUANTISED, LARGEST
    )


def gate_rows(read: Tensor, qkvz: Tensor, net: DeltaWeights, tiles: Tensor | None, out: Tensor | Quantised) -> None:
    """What was read by the rows of tiles, or by the first ones, normed and gated, into theirs of `out`."""
    values, scales = out if isinstance(out, Quantised) else (out, None)
    at_once = ROWS_AT_ONCE if tiles is not None else min(ROWS_AT_ONCE, triton.next_power_of_2(len(read)))
    parts = PROMPT_TILE // at_once
    programs = triton.cdiv(len(read), at_once) if tiles is None else len(tiles) * parts
    _gate[(net.v_heads, programs)](
        read, qkvz, net.norm, tiles, values, scales, len(read), len(qkvz), qkvz.stride(0), net.eps,
        CHANNELS=sum(net.widths), V_HEADS=net.v_heads, V_DIM=net.v_dim, V=triton.next_power_of_2(net.v_dim),
        TILED=tiles is not None, PARTS=parts, ROWS=at_once, QUANTISED=scales is not None, LARGEST=LARGEST, num_warps=4,
        launch_pdl=starts_early(),
    )  # fmt: skip
