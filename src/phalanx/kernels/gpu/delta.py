"""Gated delta nets: one token a sequence, from its projections to what the last product takes, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.delta_weights import DeltaWeights
from phalanx.kernels.fp8 import LARGEST, Quantised
from phalanx.kernels.gpu import delta_prompts
from phalanx.kernels.gpu.delta_parts import gate_and_store, length_factor, rates_of, silu
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.rows import empty_quantised
from phalanx.kernels.tiling import DecodeRows, PrefillTiles

MOST_REGISTERS = 128
"""With so many for a thread two programs share a processor: one loads its state while the other stores."""


@triton.jit
def _next_column(
    qkvz, taps, columns, row, place, position, channel, known, stride, keeps,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """What the convolution makes of some channels of a token, which is kept, if `keeps`, for those behind it."""
    new = tl.load(qkvz + row * stride + channel, mask=known, other=0.0)
    ring = columns + place * (KERNEL * CHANNELS) + channel
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(KERNEL - 1):
        at = position - (KERNEL - 1 - tap)
        seen = tl.load(ring + (at % KERNEL) * CHANNELS, mask=known & (at >= 0), other=0.0)
        weight = tl.load(taps + channel * KERNEL + tap, mask=known, other=0.0)
        total += seen.to(tl.float32) * weight.to(tl.float32)
    total += new.to(tl.float32) * tl.load(taps + channel * KERNEL + KERNEL - 1, mask=known, other=0.0).to(tl.float32)
    tl.store(ring + (position % KERNEL) * CHANNELS, new, mask=known & keeps)
    return silu(total, new.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "spare"], do_not_specialize_on_alignment=["slots", "positions"])
def _decode(
    qkvz, rates, taps, decays, decay_bias, norm, states, columns, slots, positions, out, out_scales, rows, stride,
    spare, eps, scale, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    KERNEL: tl.constexpr, K: tl.constexpr, V: tl.constexpr, QUANTISED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One value head of one row. Its state is read once and written once.

    It was written a step ago at the latest, and slots and positions were before this one: none of them waits for the
    kernel ahead. Value heads that share a key head all make its column, and the first of them keeps it. Of the spare
    slot no state is kept.
    """
    let_next_start()
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    shared: tl.constexpr = V_HEADS // K_HEADS
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    key = head // shared
    i, j = tl.arange(0, K), tl.arange(0, V)
    some_k, some_v = i < K_DIM, j < V_DIM
    place, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row)
    inside = some_k[:, None] & some_v[None, :]
    spot = states + (place * V_HEADS + head) * (K_DIM * V_DIM) + i[:, None] * V_DIM + j[None, :]
    state = tl.load(spot, mask=inside & (position > 0), other=0.0)
    wait_for_ahead()
    first = head % shared == 0
    q = _next_column(
        qkvz, taps, columns, row, place, position, key * K_DIM + i, some_k, stride, first, channels, KERNEL
    )
    k = _next_column(
        qkvz, taps, columns, row, place, position, (K_HEADS + key) * K_DIM + i, some_k, stride, first, channels, KERNEL
    )
    v = _next_column(
        qkvz, taps, columns, row, place, position, 2 * K_HEADS * K_DIM + head * V_DIM + j, some_v, stride, True,
        channels, KERNEL,
    )  # fmt: skip
    q, k = q * (length_factor(q, 0) * scale), k * length_factor(k, 0)
    decay, beta = rates_of(rates, decays, decay_bias, row, head, True, V_HEADS)
    fade = tl.exp(decay)
    moved = (v - tl.sum(state * k[:, None], 0) * fade) * beta
    read = tl.sum(state * q[:, None], 0) * fade + tl.sum(q * k, 0) * moved
    tl.store(spot, state * fade + k[:, None] * moved[None, :], mask=inside & (place != spare))
    gate = tl.load(qkvz + row * stride + channels + head * V_DIM + j, mask=some_v, other=0.0)
    gate_and_store(
        read[None, :], gate[None, :], norm, out, out_scales, row + tl.zeros([1], tl.int64), tl.full([1], True, tl.int1),
        rows, head, eps, V_HEADS, V_DIM, QUANTISED, LARGEST,
    )  # fmt: skip


def _step(
    qkvz: Tensor, rates: Tensor, net: DeltaWeights, states: Tensor, columns: Tensor, decode: DecodeRows,
    out: Tensor | Quantised,
) -> None:  # fmt: skip
    """Nothing here depends on lengths: a graph serves all. Rows that fill it up have the last slot, the spare one."""
    values, scales = out if isinstance(out, Quantised) else (out, None)
    _decode[(net.v_heads, len(decode.positions))](
        qkvz, rates, net.taps, net.decay, net.decay_bias, net.norm, states, columns, decode.slots, decode.positions,
        values, scales, len(qkvz), qkvz.stride(0), len(decode.tables) - 1, net.eps, net.k_dim**-0.5,
        K_HEADS=net.k_heads, V_HEADS=net.v_heads, K_DIM=net.k_dim, V_DIM=net.v_dim,
        KERNEL=net.taps.shape[1], K=triton.next_power_of_2(net.k_dim), V=triton.next_power_of_2(net.v_dim),
        QUANTISED=scales is not None, LARGEST=LARGEST, num_warps=8, maxnreg=MOST_REGISTERS,
        launch_pdl=starts_early(),
    )  # fmt: skip


def delta_net(
    qkvz: Tensor,
    rates: Tensor,
    net: DeltaWeights,
    states: Tensor,
    columns: Tensor,
    decode: DecodeRows | None,
    tiles: PrefillTiles | None,
    quantised: bool = False,
) -> Tensor | Quantised:
    """Rows of one token come first. In a graph those that fill up reach into the prompts, which overwrite them."""
    width = net.v_heads * net.v_dim
    out: Tensor | Quantised
    if quantised:
        out = empty_quantised(len(qkvz), width, qkvz.device)
    else:
        out = torch.empty(len(qkvz), width, dtype=qkvz.dtype, device=qkvz.device)
    if decode is not None:
        _step(qkvz, rates, net, states, columns, decode, out)
    if tiles is not None:
        delta_prompts.go_on(qkvz, rates, net, states, columns, tiles, out)
    return out
