"""Gated delta nets: one token a sequence, or a few, from projections to what the last product takes, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.delta_weights import DeltaWeights, PendingUpdates
from phalanx.kernels.fp8 import LARGEST, Quantised
from phalanx.kernels.gpu import delta_prompts
from phalanx.kernels.gpu.delta_parts import gate_and_store, length_factor, rates_of, silu, updated
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.rows import empty_quantised
from phalanx.kernels.tiling import DecodeRows, PrefillTiles

WARPS = 4
"""Of a program. Two share a processor: one loads its state while the other stores. More threads sum a state up in
more steps, and have too few registers for all that they keep.
"""


@triton.jit
def _next_column(
    qkvz, taps, columns, row, before, place, position, channel, known, stride, keeps,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, RING: tl.constexpr, PENDING: tl.constexpr,
):  # fmt: skip
    """What the convolution makes of some channels of a token, which is kept, if `keeps`, for those behind it.

    So many tokens of its sequence are rows `before` it. What is kept of them is not looked at: others may not have come
    so far yet.
    """
    new = tl.load(qkvz + row * stride + channel, mask=known, other=0.0)
    ring = columns + place * (RING * CHANNELS) + channel
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(KERNEL - 1):
        back = KERNEL - 1 - tap
        at = position - back
        seen = tl.load(ring + (at % RING) * CHANNELS, mask=known & (at >= 0) & (back > before), other=0.0)
        if PENDING:
            seen += tl.load(qkvz + (row - back) * stride + channel, mask=known & (back <= before), other=0.0)
        weight = tl.load(taps + channel * KERNEL + tap, mask=known, other=0.0)
        total += seen.to(tl.float32) * weight.to(tl.float32)
    total += new.to(tl.float32) * tl.load(taps + channel * KERNEL + KERNEL - 1, mask=known, other=0.0).to(tl.float32)
    tl.store(ring + (position % RING) * CHANNELS, new, mask=known & keeps)
    return silu(total, new.dtype).to(tl.float32)


@triton.jit
def _correct(
    state, qkvz, rates, taps, decays, decay_bias, columns, row, before, place, position, head, stride, keeps, scale,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, KERNEL: tl.constexpr,
    RING: tl.constexpr, PENDING: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """What a token reads, and what it does to the state: its key, what it moves, and the logarithm of what it leaves.

    Query and key are made as one: where either alone has fewer numbers than there are threads, the compiler lets each
    thread load all that it needs of it later on.
    """
    shared: tl.constexpr = V_HEADS // K_HEADS
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    key, first = head // shared, (head % shared == 0) & keeps
    which, i, j = tl.arange(0, 2)[:, None], tl.arange(0, K)[None, :], tl.arange(0, V)
    both = _next_column(
        qkvz, taps, columns, row, before, place, position, (which * K_HEADS + key) * K_DIM + i,
        (which < 2) & (i < K_DIM), stride, first, channels, KERNEL, RING, PENDING,
    )  # fmt: skip
    v = _next_column(
        qkvz, taps, columns, row, before, place, position, 2 * K_HEADS * K_DIM + head * V_DIM + j, j < V_DIM, stride,
        keeps, channels, KERNEL, RING, PENDING,
    )  # fmt: skip
    q, k = tl.split(tl.trans(both * length_factor(both, 1)[:, None]))
    q *= scale
    decay, beta = rates_of(rates, decays, decay_bias, row, head, True, V_HEADS)
    fade = tl.exp(decay)
    moved = (v - tl.sum(state * k[:, None], 0) * fade) * beta
    read = tl.sum(state * q[:, None], 0) * fade + tl.sum(q * k, 0) * moved
    return read, k, moved, decay


@triton.jit
def _leave(
    read, qkvz, norm, out, out_scales, row, rows, head, stride, eps,
    CHANNELS: tl.constexpr, V_HEADS: tl.constexpr, V_DIM: tl.constexpr, V: tl.constexpr, QUANTISED: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, V)
    gate = tl.load(qkvz + row * stride + CHANNELS + head * V_DIM + j, mask=j < V_DIM, other=0.0)
    gate_and_store(
        read[None, :], gate[None, :], norm, out, out_scales, row + tl.zeros([1], tl.int64), tl.full([1], True, tl.int1),
        rows, head, eps, V_HEADS, V_DIM, QUANTISED, LARGEST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "spare"], do_not_specialize_on_alignment=["slots", "positions"])
def _decode(
    qkvz, rates, taps, decays, decay_bias, norm, states, columns, updates, since, slots, positions, out, out_scales,
    rows, stride, spare, eps, scale, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, KERNEL: tl.constexpr, RING: tl.constexpr, PENDING: tl.constexpr, TOGETHER: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, QUANTISED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One value head of a sequence. Its state is read once and written once.

    It was written a step ago at the latest, and slots and positions were before this one: none of them waits for the
    kernel ahead. Value heads that share a key head all make its column, and the first of them keeps it. Of the spare
    slot nothing is kept; each of its rows is on its own.

    Where updates are pending, those that stand are made first, and then the state is written as it is before this step:
    what the tokens of this step do to it is pending for the next. There a sequence may have several rows, which lie
    together: the program of its first one takes them one after the other. The others wait for the kernel ahead like
    all, which the next kernel relies on, and do nothing else.
    """
    let_next_start()
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    i, j = tl.arange(0, K), tl.arange(0, V)
    some_k, some_v = i < K_DIM, j < V_DIM
    inside = some_k[:, None] & some_v[None, :]
    place, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row)
    keeps = place != spare
    if PENDING:
        last = tl.load(slots + row - 1, mask=row > 0, other=-1)
        if keeps & (last == place):
            wait_for_ahead()
            return
    spot = states + (place * V_HEADS + head) * (K_DIM * V_DIM) + i[:, None] * V_DIM + j[None, :]
    state = tl.load(spot, mask=inside & (position > 0), other=0.0)
    if PENDING:
        size: tl.constexpr = K_DIM + V_DIM + 1
        log = updates + (place * (PENDING * V_HEADS) + head) * size
        reached = since + (place * V_HEADS + head) * V_DIM + j
        begins = tl.maximum(tl.max(tl.load(reached, mask=some_v, other=0), 0).to(position.dtype), position - PENDING)
        for at in range(begins, position):
            state = updated(state, log + (at % PENDING) * (V_HEADS * size), i, j, some_k, some_v, K_DIM, V_DIM)
        tl.debug_barrier()  # several threads may have loaded what one of them writes
        tl.store(spot, state, mask=inside & keeps)
        tl.store(reached, position.to(tl.int32), mask=some_v & keeps)
        r = row + tl.arange(0, TOGETHER)
        together = tl.load(slots + r, mask=r < tl.num_programs(1), other=-1) == place
        count = tl.where(keeps, tl.sum(together.to(tl.int32), 0), 1)
        wait_for_ahead()
        for before in range(count):
            read, k, moved, decay = _correct(
                state, qkvz, rates, taps, decays, decay_bias, columns, row + before, before, place, position + before,
                head, stride, keeps, scale, K_HEADS, V_HEADS, K_DIM, V_DIM, KERNEL, RING, PENDING, K, V,
            )  # fmt: skip
            state = state * tl.exp(decay) + k[:, None] * moved[None, :]
            _leave(
                read, qkvz, norm, out, out_scales, row + before, rows, head, stride, eps, channels, V_HEADS, V_DIM, V,
                QUANTISED, LARGEST,
            )  # fmt: skip
            entry = log + ((position + before) % PENDING) * (V_HEADS * size)
            tl.store(entry + i, k, mask=some_k & keeps)
            tl.store(entry + K_DIM + j, moved, mask=some_v & keeps)
            tl.store(entry + K_DIM + V_DIM, decay, mask=keeps)
    else:
        wait_for_ahead()
        read, k, moved, decay = _correct(
            state, qkvz, rates, taps, decays, decay_bias, columns, row, 0, place, position, head, stride, keeps, scale,
            K_HEADS, V_HEADS, K_DIM, V_DIM, KERNEL, RING, PENDING, K, V,
        )  # fmt: skip
        tl.store(spot, state * tl.exp(decay) + k[:, None] * moved[None, :], mask=inside & keeps)
        _leave(
            read, qkvz, norm, out, out_scales, row, rows, head, stride, eps, channels, V_HEADS, V_DIM, V, QUANTISED,
            LARGEST,
        )  # fmt: skip


def _step(
    qkvz: Tensor, rates: Tensor, net: DeltaWeights, states: Tensor, columns: Tensor, pending: PendingUpdates | None,
    decode: DecodeRows, out: Tensor | Quantised,
) -> None:  # fmt: skip
    """Nothing here depends on lengths: a graph serves all. Rows that fill it up have the last slot, the spare one."""
    values, scales = out if isinstance(out, Quantised) else (out, None)
    updates, since = pending or (None, None)
    most = pending.tokens if pending else 0
    _decode[(net.v_heads, len(decode.positions))](
        qkvz, rates, net.taps, net.decay, net.decay_bias, net.norm, states, columns, updates, since,
        decode.slots, decode.positions, values, scales, len(qkvz), qkvz.stride(0), len(decode.tables) - 1, net.eps,
        net.k_dim**-0.5, K_HEADS=net.k_heads, V_HEADS=net.v_heads, K_DIM=net.k_dim, V_DIM=net.v_dim,
        KERNEL=net.taps.shape[1], RING=columns.shape[1], PENDING=most, TOGETHER=triton.next_power_of_2(most),
        K=triton.next_power_of_2(net.k_dim), V=triton.next_power_of_2(net.v_dim),
        QUANTISED=scales is not None, LARGEST=LARGEST, num_warps=WARPS,
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
    pending: PendingUpdates | None = None,
) -> Tensor | Quantised:
    """Rows of one token come first. In a graph those that fill up reach into the prompts, which overwrite them."""
    width = net.v_heads * net.v_dim
    out: Tensor | Quantised
    if quantised:
        out = empty_quantised(len(qkvz), width, qkvz.device)
    else:
        out = torch.empty(len(qkvz), width, dtype=qkvz.dtype, device=qkvz.device)
    if decode is not None:
        _step(qkvz, rates, net, states, columns, pending, decode, out)
    if tiles is not None:
        delta_prompts.go_on(qkvz, rates, net, states, columns, pending, tiles, out)
    return out
