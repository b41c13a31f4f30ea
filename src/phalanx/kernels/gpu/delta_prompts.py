"""Gated delta nets over prompts: each step a kernel for all tokens, but for one that goes along the sequences.

A chunk's corrections depend on each other, which is a triangular system whose inverse no state enters: it is made of
all chunks at once. What remains to be done in order, chunk by chunk, are products with the state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.delta_weights import CHUNK, DeltaWeights, PendingUpdates
from phalanx.kernels.fp8 import Quantised
from phalanx.kernels.gpu.delta_parts import ROWS_AT_ONCE, gate_rows, length_factor, rates_of, silu, tile_at, updated
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.shared_memory import is_hopper, is_roomy
from phalanx.kernels.tiling import PROMPT_TILE, PrefillTiles

CHANNELS_AT_ONCE = 128
SMALL_BLOCK = tl.constexpr(16)


class Along(NamedTuple):
    """How programs go along sequences: the columns of a state that one takes, what is loaded ahead, and into which
    numbers those of products are taken apart.
    """

    values: int
    stages: int
    narrow: tl.dtype


WIDE = Along(32, 1, tl.float32)
NARROW = {torch.bfloat16: Along(64, 2, tl.bfloat16)}
"""On Hoppers, by what is multiplied. Of 32 columns that nothing is loaded ahead of, Triton 3.6 builds what is wrong."""


def way_along(dtype: torch.dtype) -> Along:
    return NARROW.get(dtype, WIDE) if is_hopper() else WIDE


@triton.jit
def _convolve(
    qkvz, taps, columns, tiles, mixed, stride,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, RING: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Some channels of some rows of a tile, from this step's tokens, and from those kept where the tile begins it."""
    let_next_start()
    part = tl.program_id(1) % PARTS
    channel = tl.program_id(0) * WIDE + tl.arange(0, WIDE)[None, :]
    r = (part * ROWS + tl.arange(0, ROWS))[:, None]
    wait_for_ahead()
    place, first, count, start, begins = tile_at(tiles, tl.program_id(1) // PARTS)
    if part * ROWS >= count:
        return
    known = (r < count) & (channel < CHANNELS)
    new = qkvz + (first + r) * stride + channel
    ring = columns + place * (RING * CHANNELS) + channel
    begun = (start + part * ROWS - begins) < KERNEL
    total = tl.zeros([ROWS, WIDE], tl.float32)
    for tap in tl.static_range(KERNEL):
        at = start + r - (KERNEL - 1 - tap)
        seen = tl.load(new - (KERNEL - 1 - tap) * stride, mask=known & (at >= begins), other=0.0)
        if begun:
            kept = (at >= 0) & (at < begins)
            seen += tl.load(ring + (at % RING) * CHANNELS, mask=known & kept, other=0.0)
        weight = tl.load(taps + channel * KERNEL + tap, mask=channel < CHANNELS, other=0.0)
        total += seen.to(tl.float32) * weight.to(tl.float32)
    tl.store(mixed + (first + r) * CHANNELS + channel, silu(total, mixed.dtype.element_ty), mask=known)


@triton.jit
def _accurate(a, b, NARROW: tl.constexpr):
    """a @ b to about float32's accuracy. Numbers wider than `NARROW` are taken apart into two that are not."""
    if tl.float32 == NARROW:
        return tl.dot(a, b, input_precision="tf32x3")
    high = b.to(NARROW)
    low = (b - high.to(tl.float32)).to(NARROW)
    if a.dtype == NARROW:
        return tl.dot(a, high, tl.dot(a, low))
    a_high = a.to(NARROW)
    a_low = (a - a_high.to(tl.float32)).to(NARROW)
    return tl.dot(a_high, high, tl.dot(a_high, low, tl.dot(a_low, high)))


@triton.jit
def _inverse(below, CHUNK: tl.constexpr, NARROW: tl.constexpr):
    """Of the matrix with ones on its diagonal and `below` under it.

    Blocks on the diagonal are solved row by row, all at once. With these as D and what is under them as L, the inverse
    is that of 1 + DL, whose fourth power of DL is zero, times D.
    """
    size: tl.constexpr = SMALL_BLOCK
    blocks: tl.constexpr = CHUNK // SMALL_BLOCK
    tl.static_assert(blocks <= 4)
    b = tl.arange(0, blocks)
    on_diagonal = b[:, None, None, None] == b[None, None, :, None]
    cut = tl.reshape(below, (blocks, size, blocks, size))
    solved = -tl.sum(tl.where(on_diagonal, cut, 0.0), 2)
    i = tl.arange(0, size)
    for row in range(2, size):
        is_row = (i == row)[None, :, None]
        own = tl.sum(tl.where(is_row, solved, 0.0), 1)
        own += tl.sum(own[:, :, None] * solved, 1)
        solved = tl.where(is_row, own[:, None, :], solved)
    solved += tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :]
    diagonal = tl.reshape(tl.where(on_diagonal, solved[:, :, None, :], 0.0), (CHUNK, CHUNK))
    under = tl.reshape(tl.where(on_diagonal, 0.0, cut), (CHUNK, CHUNK))
    step = _accurate(diagonal, under, NARROW)
    twice = _accurate(step, step, NARROW)
    powers = twice - step - _accurate(step, twice, NARROW)
    return diagonal + _accurate(powers, diagonal, NARROW)


@triton.jit(do_not_specialize=["tokens"])
def _solve(
    mixed, rates, decays, decay_bias, tiles, corrections, weights, facts, tokens, scale,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A chunk of one value head: what turns errors into corrections, and how queries see corrections.

    Of each token: the decay since the chunk began, and what brings key and query to their lengths.
    """
    let_next_start()
    head, part = tl.program_id(0), tl.program_id(1) % PARTS
    key = head // (V_HEADS // K_HEADS)
    narrow: tl.constexpr = mixed.dtype.element_ty
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    wait_for_ahead()
    _, first, count, _, _ = tile_at(tiles, tl.program_id(1) // PARTS)
    if part * CHUNK >= count:
        return
    i, d = tl.arange(0, CHUNK), tl.arange(0, K)
    row, known = first + part * CHUNK + i, part * CHUNK + i < count
    spot = mixed + row[:, None] * channels + key * K_DIM + d[None, :]
    inside = known[:, None] & (d < K_DIM)[None, :]
    q = tl.load(spot, mask=inside, other=0.0)
    k = tl.load(spot + K_HEADS * K_DIM, mask=inside, other=0.0)
    q_factor, k_factor = length_factor(q, 1) * scale, length_factor(k, 1)
    decay, beta = rates_of(rates, decays, decay_bias, row, head, known, V_HEADS)
    since = tl.cumsum(decay, 0)
    earlier = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(earlier, since[:, None] - since[None, :], float("-inf"))) * k_factor[None, :]
    alike = tl.dot(k, tl.trans(k), input_precision="tf32x3") * between * (k_factor * beta)[:, None]
    inverse = _inverse(tl.where(i[:, None] > i[None, :], alike, 0.0), CHUNK, narrow) * beta[None, :]
    seen = tl.dot(q, tl.trans(k), input_precision="tf32x3") * between * q_factor[:, None]
    square = (row * V_HEADS + head)[:, None] * CHUNK + i[None, :]
    tl.store(corrections + square, inverse, mask=known[:, None])
    tl.store(weights + square, seen.to(narrow), mask=known[:, None])
    fact, each = facts + row * V_HEADS + head, tokens * V_HEADS
    tl.store(fact, since, mask=known)
    tl.store(fact + each, k_factor, mask=known)
    tl.store(fact + 2 * each, q_factor, mask=known)


@triton.jit
def _keep(
    qkvz, columns, place, row_of_zero, begins, end, channel, known, stride,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The last tokens of a sequence, for those that come behind this step."""
    for back in tl.static_range(1, KERNEL + 1):
        at = end - back
        there = known & (at >= begins)
        new = tl.load(qkvz + (row_of_zero + at) * stride + channel, mask=there, other=0.0)
        tl.store(columns + (place * RING + at % RING) * CHANNELS + channel, new, mask=there)


@triton.jit(do_not_specialize=["tokens"])
def _go_along(
    qkvz, mixed, corrections, weights, facts, tiles, states, columns, updates, state_since, out, tokens, stride,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, KERNEL: tl.constexpr,
    RING: tl.constexpr, PENDING: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Some columns of one value head's state, from the first to the last token that a sequence has in this step.

    A sequence's last tile comes first, and tells of the whole; what is asked of its others is nothing.
    """
    let_next_start()
    head, part, number = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    shared: tl.constexpr = V_HEADS // K_HEADS
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    key, c, d, v = head // shared, tl.arange(0, CHUNK), tl.arange(0, K), part * VALUES + tl.arange(0, VALUES)
    some_k, some_v = d < K_DIM, v < V_DIM
    wait_for_ahead()
    place, first, count, start, begins = tile_at(tiles, number)
    before, _, _, after, _ = tile_at(tiles, tl.maximum(number, 1) - 1)
    goes_on = (number > 0) & (before == place) & (after == start + count)
    if goes_on | (count == 0):
        return
    end, row_of_zero = start + count, first - start
    inside = some_k[:, None] & some_v[None, :]
    spot = states + (place * V_HEADS + head) * (K_DIM * V_DIM) + d[:, None] * V_DIM + v[None, :]
    state = tl.load(spot, mask=inside & (begins > 0), other=0.0).to(tl.float32)
    size: tl.constexpr = K_DIM + V_DIM + 1
    log = updates + (place * (PENDING * V_HEADS) + head) * size
    reached = state_since + (place * V_HEADS + head) * V_DIM + v
    made = tl.maximum(tl.max(tl.load(reached, mask=some_v, other=0), 0), begins - PENDING)
    for at in range(made, begins):
        state = updated(state, log + (at % PENDING) * (V_HEADS * size), d, v, some_k, some_v, K_DIM, V_DIM)
    tl.debug_barrier()  # several threads may have loaded what one of them writes
    tl.store(reached, end, mask=some_v)
    for at in range(begins, end, CHUNK):
        known = at + c < end
        row = row_of_zero + at + c
        vectors = mixed + row[:, None] * channels + key * K_DIM + d[None, :]
        q = tl.load(vectors, mask=known[:, None] & some_k[None, :], other=0.0).to(NARROW)
        k = tl.load(vectors + K_HEADS * K_DIM, mask=known[:, None] & some_k[None, :], other=0.0).to(NARROW)
        values = mixed + row[:, None] * channels + 2 * K_HEADS * K_DIM + head * V_DIM + v[None, :]
        there = known[:, None] & some_v[None, :]
        wanted = tl.load(values, mask=there, other=0.0).to(tl.float32)
        fact, each = facts + row * V_HEADS + head, tokens * V_HEADS
        since = tl.load(fact, mask=known, other=0.0)
        k_factor = tl.load(fact + each, mask=known, other=0.0)
        q_factor = tl.load(fact + 2 * each, mask=known, other=0.0)
        over = tl.load(facts + (row_of_zero + tl.minimum(at + CHUNK, end) - 1) * V_HEADS + head)
        square = (row * V_HEADS + head)[:, None] * CHUNK + c[None, :]
        correct = tl.load(corrections + square, mask=known[:, None], other=0.0)
        seen = tl.load(weights + square, mask=known[:, None], other=0.0).to(NARROW)
        fade = tl.exp(since)
        wrong = wanted - _accurate(k, state, NARROW) * (fade * k_factor)[:, None]
        moved = _accurate(correct, wrong, NARROW)
        read = _accurate(q, state, NARROW) * (fade * q_factor)[:, None] + _accurate(seen, moved, NARROW)
        tl.store(out + (row * V_HEADS + head)[:, None] * V_DIM + v[None, :], read.to(out.dtype.element_ty), mask=there)
        left = tl.exp(over - since) * k_factor
        state = state * tl.exp(over) + _accurate(tl.trans(k), moved * left[:, None], NARROW)
    tl.store(spot, state.to(spot.dtype.element_ty), mask=inside)
    first_value: tl.constexpr = 2 * K_HEADS * K_DIM
    _keep(
        qkvz, columns, place, row_of_zero, begins, end, first_value + head * V_DIM + v, some_v, stride, channels,
        KERNEL, RING,
    )  # fmt: skip
    if (head % shared == 0) & (part == 0):
        _keep(qkvz, columns, place, row_of_zero, begins, end, key * K_DIM + d, some_k, stride, channels, KERNEL, RING)
        _keep(
            qkvz, columns, place, row_of_zero, begins, end, (K_HEADS + key) * K_DIM + d, some_k, stride, channels,
            KERNEL, RING,
        )  # fmt: skip


def go_on(
    qkvz: Tensor, rates: Tensor, net: DeltaWeights, states: Tensor, columns: Tensor, pending: PendingUpdates,
    cut: PrefillTiles, out: Tensor | Quantised,
) -> None:  # fmt: skip
    """The rows of prompts, into theirs of `out`. Nothing here asks the host."""
    tokens, count, channels = len(qkvz), len(cut.tiles), sum(net.widths)
    convolution = {"KERNEL": net.taps.shape[1], "RING": columns.shape[1]}
    wide: dict[str, Any] = {"dtype": torch.float32, "device": qkvz.device}
    chunk = CHUNK if qkvz.element_size() < 4 or is_roomy() else CHUNK // 2
    mixed, read = (qkvz.new_empty(tokens, width) for width in (channels, net.widths[2]))
    corrections = torch.empty(tokens, net.v_heads, chunk, **wide)
    weights = qkvz.new_empty(tokens, net.v_heads, chunk)
    facts = torch.empty(3, tokens, net.v_heads, **wide)
    heads = {"K_HEADS": net.k_heads, "V_HEADS": net.v_heads, "K_DIM": net.k_dim, "V_DIM": net.v_dim}
    k, v = (max(16, triton.next_power_of_2(width)) for width in (net.k_dim, net.v_dim))
    parts, chunks, early = PROMPT_TILE // ROWS_AT_ONCE, PROMPT_TILE // chunk, starts_early()
    _convolve[(triton.cdiv(channels, CHANNELS_AT_ONCE), count * parts)](
        qkvz, net.taps, columns, cut.tiles, mixed, qkvz.stride(0), CHANNELS=channels, **convolution, PARTS=parts,
        ROWS=ROWS_AT_ONCE, WIDE=CHANNELS_AT_ONCE, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    _solve[(net.v_heads, count * chunks)](
        mixed, rates, net.decay, net.decay_bias, cut.tiles, corrections, weights, facts, tokens, net.k_dim**-0.5,
        **heads, K=k, CHUNK=chunk, PARTS=chunks, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    way = way_along(qkvz.dtype)
    values = min(v, way.values)
    _go_along[(net.v_heads * (v // values), count)](
        qkvz, mixed, corrections, weights, facts, cut.tiles, states, columns, pending.updates,
        pending.since, read, tokens, qkvz.stride(0), **heads, **convolution, PENDING=pending.tokens, K=k, VALUES=values,
        PARTS=v // values, CHUNK=chunk, NARROW=way.narrow, num_warps=4, num_stages=way.stages, launch_pdl=early,
    )  # fmt: skip
    gate_rows(read, qkvz, net, cut.tiles, out)
