"""What kernels of gated delta nets share, whether they take tokens one by one or in chunks."""

from __future__ import annotations

import triton
import triton.language as tl


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
