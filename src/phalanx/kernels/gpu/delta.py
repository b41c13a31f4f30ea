"""Gated delta nets: one token a sequence, or a few, from projections to what the last product takes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.delta_weights import DeltaWeights, PendingUpdates
from phalanx.kernels.fp8 import LARGEST, Quantised
from phalanx.kernels.gpu import delta_prompts
from phalanx.kernels.gpu.delta_parts import gate_and_store, gate_rows, length_factor, rates_of, silu, updated
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.gemm import HAS_GLUON
from phalanx.kernels.gpu.rows import empty_quantised
from phalanx.kernels.tiling import DecodeRows, PrefillTiles

if HAS_GLUON:
    from phalanx.kernels.gpu import delta_draft_stream, delta_stream

WARPS = 4
"""Of a program. Two share a processor: one loads its state while the other stores. More threads sum a state up in
more steps, and have too few registers for all that they keep.
"""

FEW_PROGRAMS = 1024
"""Up to these it is worth more to ask for states before the kernel ahead has ended than to ask for all at once."""

FEW_TOGETHER = 4
FEW_COLUMNS, FEWER_COLUMNS = 64, 32
"""Columns of a state that a program takes of a sequence with up to so many rows, and with more: there are registers for
all that is kept of them. A second kernel norms and gates.
"""


@triton.jit
def _convolved(
    qkvz, taps, columns, row, before, place, position, channel, known, stride, keeps,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, RING: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """What the convolution makes of some channels of tokens, which are kept, where `keeps`, for those behind them.

    So many tokens of their sequence are rows `before` them. What is kept of these is not looked at: others may not have
    come so far yet.
    """
    new = tl.load(qkvz + row * stride + channel, mask=known, other=0.0)
    ring = columns + place * (RING * CHANNELS) + channel
    total = tl.zeros(new.shape, tl.float32)
    for tap in tl.static_range(KERNEL - 1):
        back = KERNEL - 1 - tap
        at = position - back
        seen = tl.load(ring + (at % RING) * CHANNELS, mask=known & (at >= 0) & (back > before), other=0.0)
        if TOGETHER > 1:
            seen += tl.load(qkvz + (row - back) * stride + channel, mask=known & (back <= before), other=0.0)
        weight = tl.load(taps + channel * KERNEL + tap)
        total += seen.to(tl.float32) * weight.to(tl.float32)
    total += new.to(tl.float32) * tl.load(taps + channel * KERNEL + KERNEL - 1).to(tl.float32)
    tl.store(ring + (position % RING) * CHANNELS, new, mask=known & keeps)
    return silu(total, new.dtype).to(tl.float32)


@triton.jit
def _vectors(
    qkvz, taps, columns, row, t, known, place, position, head, part, stride, keeps,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, KERNEL: tl.constexpr,
    RING: tl.constexpr, TOGETHER: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Of the tokens of a sequence: query and key, [2, tokens, width], of any length yet, and value, [tokens, width].

    Query and key are made as one: where either alone has fewer numbers than there are threads, the compiler lets each
    thread load all that it needs of it later on.
    """
    shared: tl.constexpr = V_HEADS // K_HEADS
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    key, first = head // shared, (head % shared == 0) & (part == 0) & keeps
    which, i, j = tl.arange(0, 2)[:, None, None], tl.arange(0, K)[None, None, :], part * V + tl.arange(0, V)[None, :]
    some_k, some_v = tl.minimum(i, K_DIM - 1), tl.minimum(j, V_DIM - 1)
    both = _convolved(
        qkvz, taps, columns, (row + t)[None, :, None], t[None, :, None], place, (position + t)[None, :, None],
        (which * K_HEADS + key) * K_DIM + some_k, known[None, :, None] & (i < K_DIM), stride, first, channels, KERNEL,
        RING, TOGETHER,
    )  # fmt: skip
    v = _convolved(
        qkvz, taps, columns, (row + t)[:, None], t[:, None], place, (position + t)[:, None],
        2 * K_HEADS * K_DIM + head * V_DIM + some_v, known[:, None] & (j < V_DIM), stride, keeps, channels, KERNEL,
        RING, TOGETHER,
    )  # fmt: skip
    return both, v


@triton.jit
def _caught_up(
    state, spot, log, reached, begins, position, i, j, some_k, some_v, keeps, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    PENDING: tl.constexpr, EACH: tl.constexpr, NEXT: tl.constexpr, ALWAYS: tl.constexpr,
):  # fmt: skip
    """A state, and the position before which it is what it is: where there is no room for more updates, they are made
    and it is written. `NEXT` tokens are those of this step and of the next one. With `ALWAYS` they are made anyway.
    """
    writes = (position == 0) | (position + NEXT > begins + PENDING)
    if ALWAYS | writes:
        for at in range(begins, position):
            state = updated(state, log + (at % PENDING) * EACH, i, j, some_k, some_v, K_DIM, V_DIM)
    if writes:
        tl.debug_barrier()  # several threads may have loaded what one of them writes
        tl.store(spot, state.to(spot.dtype.element_ty), mask=some_k[:, None] & some_v[None, :] & keeps)
        tl.store(reached + j, position, mask=some_v & keeps)
        begins = position
    return state, begins


@triton.jit
def _log_of(
    log, e, i, j, some_k, some_v, PENDING: tl.constexpr, EACH: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr
):
    """Keys of the last tokens, what they move, and what they leave: all of them, whether they stand or not."""
    entry, exists = (log + e * EACH)[:, None], e < PENDING
    keys = tl.load(entry + i[None, :], mask=exists[:, None] & some_k[None, :], other=0.0)
    moves = tl.load(entry + K_DIM + j[None, :], mask=exists[:, None] & some_v[None, :], other=0.0)
    return keys, moves, tl.load(log + e * EACH + K_DIM + V_DIM, mask=exists, other=0.0)


@triton.jit
def _read_along(state, keys, moves, left_by, e, begins, position, q, k, v, decay, beta, PENDING: tl.constexpr):
    """What one token reads of a state along with the updates that are pending, and what it moves, each [1, columns]."""
    at = begins + (e + PENDING - begins % PENDING) % PENDING
    stands = (at < position) & (e < PENDING)
    keys, moves = tl.where(stands[:, None], keys, 0.0), tl.where(stands[:, None], moves, 0.0)
    left_by = tl.where(stands, left_by, 0.0)
    later = at[None, :] > at[:, None]
    left, rest = tl.exp(tl.sum(tl.where(later, left_by[None, :], 0.0), 1)), tl.exp(tl.sum(left_by, 0))
    one_q, one_k = tl.reshape(q, (q.shape[1],)), tl.reshape(k, (k.shape[1],))
    by_key = tl.sum(state * one_k[:, None], 0) * rest + tl.sum(moves * (tl.sum(keys * k, 1) * left)[:, None], 0)
    by_query = tl.sum(state * one_q[:, None], 0) * rest + tl.sum(moves * (tl.sum(keys * q, 1) * left)[:, None], 0)
    fade = tl.exp(decay)[:, None]
    moved = (v - by_key[None, :] * fade) * beta[:, None]
    return by_query[None, :] * fade + tl.sum(q * k, 1)[:, None] * moved, moved


@triton.jit
def _read_in_turn(state, count, q_rows, k_rows, v_rows, decays, betas, t):
    """What so many tokens read, each behind what those before it do to the state, and what they move."""
    reads, moves = tl.zeros_like(v_rows), tl.zeros_like(v_rows)
    for number in range(count):
        own = t == number
        q, k = tl.sum(tl.where(own[:, None], q_rows, 0.0), 0), tl.sum(tl.where(own[:, None], k_rows, 0.0), 0)
        v = tl.sum(tl.where(own[:, None], v_rows, 0.0), 0)
        fade, beta = tl.exp(tl.sum(tl.where(own, decays, 0.0), 0)), tl.sum(tl.where(own, betas, 0.0), 0)
        moved = (v - tl.sum(state * k[:, None], 0) * fade) * beta
        read = tl.sum(state * q[:, None], 0) * fade + tl.sum(q * k, 0) * moved
        state = state * fade + k[:, None] * moved[None, :]
        reads, moves = tl.where(own[:, None], read[None, :], reads), tl.where(own[:, None], moved[None, :], moves)
    return reads, moves


@triton.jit(do_not_specialize=["rows", "spare"], do_not_specialize_on_alignment=["slots", "positions"])
def _decode(
    qkvz, rates, taps, decays, decay_bias, norm, states, columns, updates, since, slots, positions, out, out_scales,
    rows, stride, spare, eps, scale, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, KERNEL: tl.constexpr, RING: tl.constexpr, PENDING: tl.constexpr, NEXT: tl.constexpr,
    ENTRIES: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    PARTS: tl.constexpr, QUANTISED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Some columns of one value head of a sequence, or all. Its state is read once, and written when there is no room
    for more updates.

    It was written a step ago at the latest, and slots and positions were before this one: none of them waits for the
    kernel ahead where programs are few. Others first ask for all they need, and then wait for it once. Value
    heads that share a key head all make its column, and the first of them keeps it. Of the spare slot nothing is kept;
    each of its rows is on its own.

    A sequence may have several rows, up to `TOGETHER`, which lie together: that of its first one takes them all. The
    others wait for the kernel ahead like all, which the next kernel relies on, and do nothing else. Updates that are
    pending are made before these tokens read, whether the state is written or not.
    """
    let_next_start()
    head, part, row = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1).to(tl.int64)
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    each: tl.constexpr = V_HEADS * (K_DIM + V_DIM + 1)
    i, j, t = tl.arange(0, K), part * V + tl.arange(0, V), tl.arange(0, TOGETHER)
    some_k, some_v = i < K_DIM, j < V_DIM
    place, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row).to(tl.int32)
    if not EARLY:
        wait_for_ahead()
    keeps, count = place != spare, 1
    if TOGETHER > 1:
        last = tl.load(slots + row - 1, mask=row > 0, other=-1)
        if keeps & (last == place):
            wait_for_ahead()
            return
        together = tl.load(slots + row + t, mask=row + t < tl.num_programs(1), other=-1) == place
        count = tl.where(keeps, tl.sum(together.to(tl.int32), 0), 1)
    spot = states + (place * V_HEADS + head) * (K_DIM * V_DIM) + i[:, None] * V_DIM + j[None, :]
    log = updates + place * (PENDING * each) + head * (K_DIM + V_DIM + 1)
    reached = since + (place * V_HEADS + head) * V_DIM
    begins = tl.minimum(tl.maximum(tl.load(reached + part * V), position - PENDING), position)
    state = tl.load(spot, mask=some_k[:, None] & some_v[None, :] & (position > 0), other=0.0).to(tl.float32)
    if TOGETHER == 1:
        e = tl.arange(0, ENTRIES)
        keys, moves, left_by = _log_of(log, e, i, j, some_k, some_v, PENDING, each, K_DIM, V_DIM)
    else:
        state, begins = _caught_up(
            state, spot, log, reached, begins, position, i, j, some_k, some_v, keeps, K_DIM, V_DIM, PENDING, each, NEXT,
            True,
        )  # fmt: skip
    if EARLY:
        wait_for_ahead()
    known = t < count
    seen = known[:, None] & some_v[None, :]
    both, v = _vectors(
        qkvz, taps, columns, row, t, known, place, position, head, part, stride, keeps, K_HEADS, V_HEADS, K_DIM, V_DIM,
        KERNEL, RING, TOGETHER, K, V,
    )  # fmt: skip
    decay, beta = rates_of(rates, decays, decay_bias, row + t, head, known, V_HEADS)
    if PARTS == 1:
        gates = tl.load(qkvz + (row + t)[:, None] * stride + channels + head * V_DIM + j[None, :], mask=seen, other=0.0)
    q, k = tl.split(tl.permute(both * length_factor(both, 2)[:, :, None], (1, 2, 0)))
    q *= scale
    if TOGETHER == 1:
        state, begins = _caught_up(
            state, spot, log, reached, begins, position, i, j, some_k, some_v, keeps, K_DIM, V_DIM, PENDING, each, NEXT,
            False,
        )  # fmt: skip
        read, moved = _read_along(state, keys, moves, left_by, e, begins, position, q, k, v, decay, beta, PENDING)
    else:
        read, moved = _read_in_turn(state, count, q, k, v, decay, beta, t)
    entry, kept = log + ((position + t) % PENDING) * each, known & keeps
    tl.store(entry[:, None] + i[None, :], k, mask=kept[:, None] & some_k[None, :] & (part == 0))
    tl.store(entry[:, None] + K_DIM + j[None, :], moved, mask=kept[:, None] & some_v[None, :])
    tl.store(entry + K_DIM + V_DIM, decay, mask=kept & (part == 0))
    if PARTS == 1:
        gate_and_store(
            read, gates, norm, out, out_scales, row + t, known, rows, head, eps, V_HEADS, V_DIM, QUANTISED, LARGEST
        )
    else:
        spots = out + ((row + t) * V_HEADS + head)[:, None] * V_DIM + j[None, :]
        tl.store(spots, read.to(out.dtype.element_ty), mask=seen)


def _step(
    qkvz: Tensor, rates: Tensor, net: DeltaWeights, states: Tensor, columns: Tensor, pending: PendingUpdates,
    decode: DecodeRows, out: Tensor | Quantised,
) -> None:  # fmt: skip
    """Nothing here depends on lengths: a graph serves all. Rows that fill it up have the last slot, the spare one."""
    values, scales = out if isinstance(out, Quantised) else (out, None)
    rows, most = len(decode.positions), 1 if decode.apart else pending.most
    if HAS_GLUON and most == 1 and delta_stream.is_streamed(net, states):
        delta_stream.step(qkvz, rates, net, states, columns, pending, decode, out)
        return
    if HAS_GLUON and delta_draft_stream.is_streamed(net, most, pending.tokens, states):
        delta_draft_stream.step(qkvz, rates, net, states, columns, pending, decode, out)
        return
    together = triton.next_power_of_2(most)
    width = triton.next_power_of_2(net.v_dim)
    if together > FEW_TOGETHER:
        width = min(width, FEWER_COLUMNS)
    elif together > 1:
        width = min(width, FEW_COLUMNS)
    parts = triton.cdiv(net.v_dim, width)
    read = values if parts == 1 else qkvz.new_empty(rows, net.v_heads * net.v_dim)
    _decode[(net.v_heads * parts, rows)](
        qkvz, rates, net.taps, net.decay, net.decay_bias, net.norm, states, columns, pending.updates, pending.since,
        decode.slots, decode.positions, read, scales, len(qkvz), qkvz.stride(0), len(decode.tables) - 1, net.eps,
        net.k_dim**-0.5, K_HEADS=net.k_heads, V_HEADS=net.v_heads, K_DIM=net.k_dim, V_DIM=net.v_dim,
        KERNEL=net.taps.shape[1], RING=columns.shape[1], PENDING=pending.tokens, NEXT=most + pending.most,
        ENTRIES=triton.next_power_of_2(pending.tokens), TOGETHER=together,
        EARLY=together > 1 or net.v_heads * rows <= FEW_PROGRAMS, K=triton.next_power_of_2(net.k_dim), V=width,
        PARTS=parts, QUANTISED=scales is not None, LARGEST=LARGEST, num_warps=WARPS, launch_pdl=starts_early(),
    )  # fmt: skip
    if parts > 1:
        gate_rows(read, qkvz, net, None, out)


def delta_net(
    qkvz: Tensor,
    rates: Tensor,
    net: DeltaWeights,
    states: Tensor,
    columns: Tensor,
    decode: DecodeRows | None,
    tiles: PrefillTiles | None,
    pending: PendingUpdates,
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
        _step(qkvz, rates, net, states, columns, pending, decode, out)
    if tiles is not None:
        delta_prompts.go_on(qkvz, rates, net, states, columns, pending, tiles, out)
    return out
