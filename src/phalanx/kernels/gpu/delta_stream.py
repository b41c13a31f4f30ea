"""Gated delta nets: one token of each of many sequences, for Hopper: states stream through shared memory in bulk.

A program stays and takes one head of a sequence after the other. What it has read of a state makes room for the next
ones: memory does not idle while heads are computed. Small things are asked for one head ahead, and what is one number a
head at the start, for all heads. See `delta` for what is computed, and `stream` for why this is Gluon.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from phalanx.kernels.delta_weights import DeltaWeights, PendingUpdates
from phalanx.kernels.fp8 import LARGEST, Quantised
from phalanx.kernels.gpu.stream import (
    HAS_REINTERPRET,
    SHARED_BYTES,
    SYSTEM_BYTES,
    all_threads,
    copy_in,
    multiprocessors,
)
from phalanx.kernels.tiling import DecodeRows

DIM, KERNEL = 128, 4
"""Of heads and of the convolution that this is written for: how numbers are dealt to threads follows from them."""

HEADS_AT_ONCE = 128
"""Heads of which a program looks up at the start where they are; with more there are more programs."""

REGISTERS = 2**16
"""Of a multiprocessor."""


class Way(NamedTuple):
    """How many programs share a multiprocessor, the warps of each, and the rows of a state that are copied at once.

    While one program computes what a head is asked for, the copies of the other are on their way.
    """

    together: int = 2
    warps: int = 4
    rows: int = 32

    @property
    def registers(self) -> int:
        """That a thread may take."""
        return min(255, REGISTERS // (32 * self.warps * self.together) // 8 * 8)


WAY, NARROW_WAY = Way(), Way(rows=64)

SMALL_BYTES = 1024
"""For barriers, and for what threads exchange when they sum up."""

_DIM, _HEADS_AT_ONCE = gl.constexpr(DIM), gl.constexpr(HEADS_AT_ONCE)
_LARGEST = gl.constexpr(LARGEST)


@gluon.constexpr_function
def with_taps(lanes: list[int], warps: list[int]) -> gl.DistributedLinearLayout:
    """How channels with the taps of each are dealt, four channels a thread: the strides of lanes and of warps."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0]], [[stride, 0] for stride in lanes], [[stride, 0] for stride in warps], [],
        [DIM, KERNEL],
    )  # fmt: skip


@gluon.constexpr_function
def dealt_to_all(warps: int) -> gl.DistributedLinearLayout:
    """Every warp has all channels."""
    return with_taps([4, 8, 16, 32, 64], [0] * (warps.bit_length() - 1))


@gluon.constexpr_function
def dealt_by_warp(warps: int) -> gl.DistributedLinearLayout:
    """Four warps have a quarter each, and a warp has it four times: as it has the columns of a state."""
    return with_taps([4, 8, 16, 0, 0], [32, 64, *[0] * (warps.bit_length() - 3)])


@gluon.jit
def seen_as(memory, kind: gl.constexpr, shape: gl.constexpr):
    """Shared memory as so many vectors, which are indexed."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return memory.reinterpret(kind, shape, layout) if HAS_REINTERPRET else memory._reinterpret(kind, shape, layout)


@gluon.jit
def number_of(table, at):
    """One of a table in shared memory, [numbers, 1]."""
    everywhere: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(table.index(at).load(everywhere), 0)


@gluon.jit
def _ask_kept(taps, columns, place, position, channel, tiled, tap, CHANNELS: gl.constexpr, RING: gl.constexpr):
    """Of some channels, what the convolution looks back on, oldest first, and its taps, [channels, taps]."""
    ring = columns + place.to(gl.int64) * (RING * CHANNELS) + channel
    third = gl.load(ring + (position + RING - 3) % RING * CHANNELS, mask=position >= 3, other=0.0)
    second = gl.load(ring + (position + RING - 2) % RING * CHANNELS, mask=position >= 2, other=0.0)
    last = gl.load(ring + (position + RING - 1) % RING * CHANNELS, mask=position >= 1, other=0.0)
    return third, second, last, gl.load(taps + tiled[:, None] * 4 + tap[None, :])


@gluon.jit
def _ask_all_kept(
    taps, columns, place, position, head, i, j, K_HEADS: gl.constexpr, V_HEADS: gl.constexpr, RING: gl.constexpr
):
    """Of the query, the key and the value of a head."""
    CHANNELS: gl.constexpr = (2 * K_HEADS + V_HEADS) * _DIM
    to_all: gl.constexpr = dealt_to_all(gl.num_warps())
    by_warp: gl.constexpr = dealt_by_warp(gl.num_warps())
    tiled_i, tiled_j = gl.arange(0, _DIM, gl.SliceLayout(1, to_all)), gl.arange(0, _DIM, gl.SliceLayout(1, by_warp))
    tap_i, tap_j = gl.arange(0, 4, gl.SliceLayout(0, to_all)), gl.arange(0, 4, gl.SliceLayout(0, by_warp))
    key = head // (V_HEADS // K_HEADS)
    q_at, k_at, v_at = key * _DIM, (K_HEADS + key) * _DIM, (2 * K_HEADS + head) * _DIM
    q = _ask_kept(taps, columns, place, position, q_at + i, q_at + tiled_i, tap_i, CHANNELS, RING)
    k = _ask_kept(taps, columns, place, position, k_at + i, k_at + tiled_i, tap_i, CHANNELS, RING)
    v = _ask_kept(taps, columns, place, position, v_at + j, v_at + tiled_j, tap_j, CHANNELS, RING)
    return q, k, v


@gluon.jit
def _ask_given(qkvz, row, stride, head, i, j, K_HEADS: gl.constexpr, V_HEADS: gl.constexpr):
    """Query, key, value and gate of a head, as they were projected."""
    given, key = qkvz + row.to(gl.int64) * stride, head // (V_HEADS // K_HEADS)
    q, k = gl.load(given + key * _DIM + i), gl.load(given + (K_HEADS + key) * _DIM + i)
    v = gl.load(given + (2 * K_HEADS + head) * _DIM + j)
    return q, k, v, gl.load(given + (2 * K_HEADS + V_HEADS + head) * _DIM + j)


@gluon.jit
def silu(x):
    return x / (1 + gl.exp(-x))


@gluon.jit
def _convolved(kept, new, layout: gl.constexpr):
    """What the convolution makes of some channels, in float32 what the model's dtype holds."""
    third, second, last, taps = kept
    even, odd = gl.split(gl.reshape(taps.to(gl.float32), [_DIM, 2, 2]))
    first_tap, third_tap = gl.split(even)
    second_tap, fourth_tap = gl.split(odd)
    total = third.to(gl.float32) * gl.convert_layout(first_tap, layout, assert_trivial=True)
    total += second.to(gl.float32) * gl.convert_layout(second_tap, layout, assert_trivial=True)
    total += last.to(gl.float32) * gl.convert_layout(third_tap, layout, assert_trivial=True)
    total += new.to(gl.float32) * gl.convert_layout(fourth_tap, layout, assert_trivial=True)
    return silu(total.to(new.dtype).to(gl.float32)).to(new.dtype).to(gl.float32)


@gluon.jit
def copy_entries(
    updates, entries, place, head, begins, position, buffer, e, w, V_HEADS: gl.constexpr, PENDING: gl.constexpr,
    E: gl.constexpr,
):  # fmt: skip
    """Keys and moves of the updates that stand are on their way; what all of them leave is returned."""
    each: gl.constexpr = V_HEADS * (2 * _DIM + 1)
    log = updates + place.to(gl.int64) * (PENDING * each) + head * (2 * _DIM + 1)
    for at in range(begins, position):
        number = at % PENDING
        async_copy.async_copy_global_to_shared(entries.index(buffer * E + number), log + number * each + w)
    async_copy.commit_group()
    return gl.load(log + e * each + 2 * _DIM, mask=e < PENDING, other=0.0)


@gluon.jit
def copy_rows(
    tiles, stages, filled, places, chunk, first, programs, count, V_HEADS: gl.constexpr, STAGES: gl.constexpr
):
    """Some rows of a state of this program, by their number among all its rows, are on their way."""
    ROWS: gl.constexpr = tiles.block_shape[0]
    CHUNKS: gl.constexpr = _DIM // ROWS
    BYTES: gl.constexpr = ROWS * _DIM * tiles.dtype.primitive_bitwidth // 8
    number, known = chunk // CHUNKS, chunk < count * CHUNKS
    row = number_of(places, number) * V_HEADS + (first + number * programs) % V_HEADS
    full, stage = filled.index(chunk % STAGES), stages.index(chunk % STAGES)
    mbarrier.expect(full, BYTES, pred=known)
    copy_in(tiles, [row * _DIM + chunk % CHUNKS * ROWS, 0], full, stage, pred=known)


@gluon.jit
def softplus(x):
    grown = gl.exp(gl.minimum(x, 20.0))
    soft = gl.where(grown < 1e-3, grown - grown * grown / 2, gl.log(1 + grown))
    return gl.where(x > 20.0, x, soft)


@gluon.jit
def sigmoid(x):
    """In float32 what the dtype of x holds."""
    return (1 / (1 + gl.exp(-x.to(gl.float32)))).to(x.dtype).to(gl.float32)


@gluon.jit
def _rates_of(rates, decays, decay_bias, row, head, known, V_HEADS: gl.constexpr):
    """See `delta_parts.rates_of`."""
    place = rates + row.to(gl.int64) * (2 * V_HEADS) + head
    fast = gl.load(place, mask=known, other=0.0)
    slow = gl.load(place + V_HEADS, mask=known, other=0.0).to(gl.float32) + gl.load(decay_bias + head)
    soft = softplus(slow)
    return -gl.exp(gl.load(decays + head)) * soft, sigmoid(fast)


@gluon.jit
def _gate_and_store(read, gate, weight, out, out_scales, row, rows, head, j, eps, V_HEADS: gl.constexpr):
    """One head of a row, see `delta_parts.gate_and_store`."""
    wide = read.to(gate.dtype).to(gl.float32)
    factor = gl.rsqrt(gl.sum(wide * wide, 0) / _DIM + eps)
    normed = (weight * (wide * factor).to(gate.dtype)).to(gl.float32)
    gated = (normed * silu(gate.to(gl.float32))).to(gate.dtype)
    spot = out + row.to(gl.int64) * (V_HEADS * _DIM) + head * _DIM + j
    if out_scales is not None:
        scale = gl.maximum(gl.max(gl.abs(gated.to(gl.float32)), 0), 1e-10) / _LARGEST
        gl.store(spot, (gated.to(gl.float32) / scale).to(out.dtype.element_ty))
        gl.store(out_scales + head.to(gl.int64) * rows + row, scale)
    else:
        gl.store(spot, gated)


@gluon.jit
def _read_pending(
    entries, by_keys, by_queries, fades, buffer, begins, position, PENDING: gl.constexpr, E: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """What key and query read of the updates that stand, and what these leave of the state."""
    by_key, by_query = gl.zeros([_DIM], gl.float32, layout), gl.zeros([_DIM], gl.float32, layout)
    rest = 1.0
    for at in range(begins, position):
        number = at % PENDING
        moves, fade = entries.index(buffer * E + number).slice(_DIM, _DIM, 0).load(layout), number_of(fades, number)
        by_key = by_key * fade + moves * number_of(by_keys, number)
        by_query = by_query * fade + moves * number_of(by_queries, number)
        rest *= fade
    return by_key, by_query, rest


@gluon.jit
def _write_rows(
    spot, stage, entries, fades, buffer, begins, position, FROM: gl.constexpr, TILE: gl.constexpr, E: gl.constexpr,
    PENDING: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Rows of a state in shared memory with the updates that stand, to where they came from."""
    ROWS: gl.constexpr = stage.shape[0]
    i, j = gl.arange(0, TILE, gl.SliceLayout(1, layout)), gl.arange(0, _DIM, gl.SliceLayout(0, layout))
    for piece in gl.static_range(ROWS // TILE):
        state = stage.slice(piece * TILE, TILE, 0).load(layout).to(gl.float32)
        state = gl.where(position > 0, state, 0.0)
        for at in range(begins, position):
            number = at % PENDING
            entry = entries.index(buffer * E + number)
            k = entry.slice(FROM + piece * TILE, TILE, 0).load(gl.SliceLayout(1, layout))
            moved = entry.slice(_DIM, _DIM, 0).load(gl.SliceLayout(0, layout))
            state = state * number_of(fades, number) + k[:, None] * moved[None, :]
        rows = spot + (FROM + piece * TILE + i)[:, None] * _DIM + j[None, :]
        gl.store(rows, state.to(spot.dtype.element_ty))


@gluon.jit(do_not_specialize=["count", "rows", "spare"], do_not_specialize_on_alignment=["slots", "positions"])
def stream_states(
    tiles, qkvz, rates, taps, decays, decay_bias, norm, states, columns, updates, since, slots, positions, out,
    out_scales, count, rows, stride, spare, eps, scale, K_HEADS: gl.constexpr, V_HEADS: gl.constexpr,
    RING: gl.constexpr, PENDING: gl.constexpr, NEXT: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Value heads of `count` rows, of each the only one of its sequence. See `delta._decode`.

    A state is read along with the updates that are pending, whether they are made then or not.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = tiles.block_shape[0]
    CHUNKS: gl.constexpr = _DIM // ROWS
    TILE: gl.constexpr = 4 * WARPS
    CHANNELS: gl.constexpr = (2 * K_HEADS + V_HEADS) * _DIM
    SHARED: gl.constexpr = V_HEADS // K_HEADS
    EACH: gl.constexpr = V_HEADS * (2 * _DIM + 1)
    in_tiles: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [WARPS // 4, 4], [1, 0])
    of_tile: gl.constexpr = gl.SliceLayout(1, in_tiles)
    by_column: gl.constexpr = gl.SliceLayout(0, in_tiles)
    by_entry: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    everywhere: gl.constexpr = gl.SliceLayout(0, by_entry)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    vectors: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    cuda.gdc_launch_dependents()
    first, programs, units = gl.program_id(0), gl.num_programs(0), count * V_HEADS
    own = gl.cdiv(units - first, programs)

    stages = gl.allocate_shared_memory(tiles.dtype, [STAGES, ROWS, _DIM], tiles.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    log = gl.allocate_shared_memory(gl.float32, [2, E, 2 * _DIM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    entries = seen_as(log, gl.float32, [2 * E, 2 * _DIM])
    whole = gl.allocate_shared_memory(gl.int32, [3, _HEADS_AT_ONCE], vectors)
    real = gl.allocate_shared_memory(gl.float32, [2, _HEADS_AT_ONCE], vectors)
    places, places_of = seen_as(whole.index(0), gl.int32, [_HEADS_AT_ONCE, 1]), whole.index(0)
    at_positions, positions_of = seen_as(whole.index(1), gl.int32, [_HEADS_AT_ONCE, 1]), whole.index(1)
    begin_at, begins_of = seen_as(whole.index(2), gl.int32, [_HEADS_AT_ONCE, 1]), whole.index(2)
    decay_by, decays_of = seen_as(real.index(0), gl.float32, [_HEADS_AT_ONCE, 1]), real.index(0)
    beta_by, betas_of = seen_as(real.index(1), gl.float32, [_HEADS_AT_ONCE, 1]), real.index(1)
    turned = gl.allocate_shared_memory(gl.float32, [2, _DIM], vectors)
    met = gl.allocate_shared_memory(gl.float32, [3, E], vectors)
    by_keys, by_queries = seen_as(met.index(0), gl.float32, [E, 1]), seen_as(met.index(1), gl.float32, [E, 1])
    fades = seen_as(met.index(2), gl.float32, [E, 1])

    n = gl.arange(0, _HEADS_AT_ONCE, flat)
    unit = first + n * programs
    known = unit < units
    row_of, head_of = unit // V_HEADS, unit % V_HEADS
    place_of = gl.load(slots + row_of, mask=known, other=0).to(gl.int32)
    position_of = gl.load(positions + row_of, mask=known, other=0).to(gl.int32)
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
    fence_async_shared()
    places_of.store(place_of)
    positions_of.store(position_of)
    all_threads()
    for i in gl.static_range(STAGES):
        copy_rows(tiles, stages, filled, places, i, first, programs, own, V_HEADS, STAGES)
    reached = gl.load(since + (place_of.to(gl.int64) * V_HEADS + head_of) * _DIM, mask=known, other=0)
    begins_of.store(gl.minimum(gl.maximum(reached, position_of - PENDING), position_of))
    all_threads()

    i, j = gl.arange(0, _DIM, everywhere), gl.arange(0, _DIM, by_column)
    e, w = gl.arange(0, E, flat), gl.arange(0, 2 * _DIM, flat)
    weight = gl.load(norm + j)
    row, head = first // V_HEADS, first % V_HEADS
    place, position = number_of(places, 0), number_of(at_positions, 0)
    left = copy_entries(
        updates, entries, place, head, number_of(begin_at, 0), position, 0, e, w, V_HEADS, PENDING, E
    )  # fmt: skip
    q_kept, k_kept, v_kept = _ask_all_kept(taps, columns, place, position, head, i, j, K_HEADS, V_HEADS, RING)
    cuda.gdc_wait()
    q_new, k_new, v_new, gate = _ask_given(qkvz, row, stride, head, i, j, K_HEADS, V_HEADS)
    decay_of, beta_of = _rates_of(rates, decays, decay_bias, row_of, head_of, known, V_HEADS)
    decays_of.store(decay_of)
    betas_of.store(beta_of)

    for number in range(own):
        async_copy.wait_group(0)
        met.index(2).store(gl.exp(left))
        all_threads()
        buffer = number & 1
        place, position, begins = (
            number_of(places, number),
            number_of(at_positions, number),
            number_of(begin_at, number),
        )
        decay, beta = number_of(decay_by, number), number_of(beta_by, number)
        row, head = (first + number * programs) // V_HEADS, (first + number * programs) % V_HEADS
        key = head // SHARED

        keeps = place != spare
        first_of_key = keeps & (head % SHARED == 0)
        ring = columns + (place.to(gl.int64) * RING + position % RING) * CHANNELS
        gl.store(ring + key * _DIM + i, q_new, mask=first_of_key)
        gl.store(ring + (K_HEADS + key) * _DIM + i, k_new, mask=first_of_key)
        gl.store(ring + (2 * K_HEADS + head) * _DIM + j, v_new, mask=keeps)
        q, k = _convolved(q_kept, q_new, everywhere), _convolved(k_kept, k_new, everywhere)
        v = _convolved(v_kept, v_new, by_column)
        q = q * gl.rsqrt(gl.sum(q * q, 0) + 1e-6) * scale
        k = k * gl.rsqrt(gl.sum(k * k, 0) + 1e-6)
        turned.index(0).store(q)
        turned.index(1).store(k)
        keys = log.index(buffer).slice(0, _DIM, 1).load(by_entry)
        met.index(0).store(gl.sum(keys * k[None, :], 1))
        met.index(1).store(gl.sum(keys * q[None, :], 1))
        all_threads()

        following = gl.minimum(number + 1, own - 1)
        next_unit = first + following * programs
        next_row, next_head = next_unit // V_HEADS, next_unit % V_HEADS
        next_place, next_position = number_of(places, following), number_of(at_positions, following)
        next_q_kept, next_k_kept, next_v_kept = _ask_all_kept(
            taps, columns, next_place, next_position, next_head, i, j, K_HEADS, V_HEADS, RING
        )
        next_q, next_k, next_v, next_gate = _ask_given(qkvz, next_row, stride, next_head, i, j, K_HEADS, V_HEADS)
        left = copy_entries(
            updates, entries, next_place, next_head, number_of(begin_at, following), next_position, 1 - buffer, e, w,
            V_HEADS, PENDING, E,
        )  # fmt: skip

        old_by_key, old_by_query, rest = _read_pending(
            entries, by_keys, by_queries, fades, buffer, begins, position, PENDING, E, by_column
        )
        makes_updates = keeps & ((position == 0) | (position + NEXT > begins + PENDING))
        spot = states + (place.to(gl.int64) * V_HEADS + head) * (_DIM * _DIM)
        by_key, by_query = gl.zeros([TILE, _DIM], gl.float32, in_tiles), gl.zeros([TILE, _DIM], gl.float32, in_tiles)
        for c in gl.static_range(CHUNKS):
            chunk = number * CHUNKS + c
            stage = stages.index(chunk % STAGES)
            mbarrier.wait(filled.index(chunk % STAGES), chunk // STAGES & 1)
            for piece in gl.static_range(ROWS // TILE):
                state = stage.slice(piece * TILE, TILE, 0).load(in_tiles).to(gl.float32)
                by_query += state * turned.index(0).slice(c * ROWS + piece * TILE, TILE, 0).load(of_tile)[:, None]
                by_key += state * turned.index(1).slice(c * ROWS + piece * TILE, TILE, 0).load(of_tile)[:, None]
            if makes_updates:
                _write_rows(
                    spot, stage, entries, fades, buffer, begins, position, c * ROWS, TILE, E, PENDING, in_tiles
                )  # fmt: skip
            all_threads()
            copy_rows(tiles, stages, filled, places, chunk + STAGES, first, programs, own, V_HEADS, STAGES)
        if makes_updates:
            gl.store(since + (place.to(gl.int64) * V_HEADS + head) * _DIM + j, j * 0 + position)
        begun = position > 0
        from_key = gl.where(begun, gl.sum(by_key, 0) * rest, 0.0) + old_by_key
        from_query = gl.where(begun, gl.sum(by_query, 0) * rest, 0.0) + old_by_query
        fade = gl.exp(decay)
        moved = (v - from_key * fade) * beta
        read = from_query * fade + gl.sum(q * k, 0) * moved

        update = updates + place.to(gl.int64) * (PENDING * EACH) + position % PENDING * EACH + head * (2 * _DIM + 1)
        gl.store(update + i, k, mask=keeps)
        gl.store(update + _DIM + j, moved, mask=keeps)
        gl.store(update + 2 * _DIM, decay, mask=keeps)
        _gate_and_store(read, gate, weight, out, out_scales, row, rows, head, j, eps, V_HEADS)
        q_new, k_new, v_new, gate = next_q, next_k, next_v, next_gate
        q_kept, k_kept, v_kept = next_q_kept, next_k_kept, next_v_kept
    async_copy.wait_group(0)


def stages_of(way: Way, entries: int, number_bytes: int) -> int:
    """How many copies a program has room for beside updates, twice, and small things."""
    small = 4 * (5 * HEADS_AT_ONCE + 2 * DIM + 3 * entries) + SMALL_BYTES
    room = SHARED_BYTES // way.together - SYSTEM_BYTES - 2 * entries * 2 * DIM * 4 - small
    return room // (way.rows * DIM * number_bytes)


def tiles_of(states: Tensor, way: Way) -> TensorDescriptor:
    """States as they are copied."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * states.element_size(), rank=2)
    return TensorDescriptor.from_tensor(states.view(-1, DIM), [way.rows, DIM], layout)


def is_streamed(net: DeltaWeights, rows: int, states: Tensor) -> bool:
    """On a GPU that has the instructions, of heads that this is written for, where programs have several each."""
    fits = net.k_dim == net.v_dim == DIM and net.taps.shape[1] == KERNEL
    return fits and states.is_cuda and rows * net.v_heads > WAY.together * multiprocessors(states.device) > 0


def step(
    qkvz: Tensor, rates: Tensor, net: DeltaWeights, states: Tensor, columns: Tensor, pending: PendingUpdates,
    decode: DecodeRows, out: Tensor | Quantised, way: Way | None = None,
) -> None:  # fmt: skip
    """One token of each row, which is the only one of its sequence."""
    way = way or (WAY if states.element_size() == 4 else NARROW_WAY)
    values, scales = out if isinstance(out, Quantised) else (out, None)
    rows, entries = len(decode.positions), triton.next_power_of_2(pending.tokens)
    units = rows * net.v_heads
    programs = max(way.together * multiprocessors(states.device), triton.cdiv(units, HEADS_AT_ONCE))
    stream_states[(min(programs, units),)](
        tiles_of(states, way), qkvz, rates, net.taps, net.decay, net.decay_bias, net.norm, states, columns,
        pending.updates, pending.since, decode.slots, decode.positions, values, scales, rows, len(qkvz), qkvz.stride(0),
        len(decode.tables) - 1, net.eps, net.k_dim**-0.5, K_HEADS=net.k_heads, V_HEADS=net.v_heads,
        RING=columns.shape[1], PENDING=pending.tokens, NEXT=1 + pending.most, E=entries,
        STAGES=stages_of(way, entries, states.element_size()), num_warps=way.warps, maxnreg=way.registers,
        launch_pdl=True,
    )  # fmt: skip
