"""Gated delta nets: one token of each of many sequences, for Hopper: states stream through shared memory in bulk.

A program stays and takes one head of a sequence after the other. What it has read of a state makes room for the next
ones: memory does not idle while heads are computed. Small things are asked for one head ahead, and what is one number a
head at the start, for all heads. See `delta` for what is computed, and `stream` for why this is Gluon.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
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

TOGETHER, WARPS = 2, 4
"""Programs that share a multiprocessor, and the warps of each: one computes while copies of the other are under way."""

COPY_BYTES = 2**15
"""Of a state at once; half of it where many updates leave no room for two such copies."""

SMALL_BYTES = 1024
"""For barriers, and for what threads exchange when they sum up."""

_DIM, _HEADS_AT_ONCE = gl.constexpr(DIM), gl.constexpr(HEADS_AT_ONCE)
_LARGEST = gl.constexpr(LARGEST)


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
def _first_channel(part, head, K_HEADS: gl.constexpr, V_HEADS: gl.constexpr):
    """Of the query, the key, the value and the gate of a head."""
    key = head // (V_HEADS // K_HEADS)
    of_value = gl.where(part == 2, 2 * K_HEADS + head, 2 * K_HEADS + V_HEADS + head)
    return gl.where(part == 0, key, gl.where(part == 1, K_HEADS + key, of_value)) * _DIM


@gluon.jit
def _ask_kept(
    taps, columns, place, position, head, channel, K_HEADS: gl.constexpr, V_HEADS: gl.constexpr, RING: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Of each part of a head what its convolution looks back on, oldest first, and the taps; a gate has neither."""
    CHANNELS: gl.constexpr = (2 * K_HEADS + V_HEADS) * _DIM
    tapped: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [gl.num_warps(), 1], [1, 0])
    convolved = (gl.arange(0, 4, gl.SliceLayout(1, layout)) < 3)[:, None]
    ring = columns + place.to(gl.int64) * (RING * CHANNELS) + channel
    third = gl.load(ring + (position + RING - 3) % RING * CHANNELS, mask=convolved & (position >= 3), other=0.0)
    second = gl.load(ring + (position + RING - 2) % RING * CHANNELS, mask=convolved & (position >= 2), other=0.0)
    last = gl.load(ring + (position + RING - 1) % RING * CHANNELS, mask=convolved & (position >= 1), other=0.0)
    part, number = gl.arange(0, 4, gl.SliceLayout(1, tapped)), gl.arange(0, 4 * _DIM, gl.SliceLayout(0, tapped))
    of_part = taps + (_first_channel(part, head, K_HEADS, V_HEADS) * 4)[:, None] + number[None, :]
    return third, second, last, gl.load(of_part, mask=(part < 3)[:, None], other=0.0)


@gluon.jit
def silu(x):
    return x / (1 + gl.exp(-x))


@gluon.jit
def taps_of(taps, shape: gl.constexpr, layout: gl.constexpr):
    """The four taps of all channels, one after the other."""
    even, odd = gl.split(gl.reshape(taps.to(gl.float32), shape + [2, 2]))  # noqa: RUF005
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, layout, assert_trivial=True),
        gl.convert_layout(second, layout, assert_trivial=True),
        gl.convert_layout(third, layout, assert_trivial=True),
        gl.convert_layout(fourth, layout, assert_trivial=True),
    )


@gluon.jit
def _made(kept, new, scale, layout: gl.constexpr):
    """Query and key, of their length, value, and what the gate lets through: what a head makes of what it was given.

    What the convolution makes is, in float32, what the model's dtype holds.
    """
    third, second, last, taps = kept
    third_tap, second_tap, last_tap, own_tap = taps_of(taps, [4, _DIM], layout)
    part = gl.arange(0, 4, gl.SliceLayout(1, layout))
    convolved = (part < 3)[:, None]
    total = third.to(gl.float32) * third_tap + second.to(gl.float32) * second_tap
    total += last.to(gl.float32) * last_tap
    total += new.to(gl.float32) * own_tap
    opened = silu(gl.where(convolved, total.to(new.dtype), new).to(gl.float32))
    made = gl.where(convolved, opened.to(new.dtype).to(gl.float32), opened)
    length = gl.rsqrt(gl.sum(made * made, 1) + 1e-6)
    return made * gl.where(part == 0, length * scale, gl.where(part == 1, length, 1.0))[:, None]


@gluon.jit
def _ask_updates(
    updates, log, place, head, begins, position, V_HEADS: gl.constexpr, PENDING: gl.constexpr, layout: gl.constexpr
):
    """Keys and moves of the updates that stand are on their way, the oldest first, and zeros behind them.

    What is returned is what each leaves of the state, as a logarithm, and what the one behind it does.
    """
    EACH: gl.constexpr = V_HEADS * (2 * _DIM + 1)
    E: gl.constexpr = log.shape[0]
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    count, ahead = position - begins, begins % PENDING
    of_head = updates + place.to(gl.int64) * (PENDING * EACH) + head * (2 * _DIM + 1)
    o, w = gl.arange(0, E, gl.SliceLayout(1, layout)), gl.arange(0, 2 * _DIM, gl.SliceLayout(0, layout))
    entry = of_head + ((ahead + o) % PENDING * EACH)[:, None] + w[None, :]
    async_copy.async_copy_global_to_shared(log, entry, mask=(o < count)[:, None] & (w >= 0)[None, :])
    async_copy.commit_group()
    o, of_left = gl.arange(0, E, flat), of_head + 2 * _DIM
    left = gl.load(of_left + (ahead + o) % PENDING * EACH, mask=o < count, other=0.0)
    return left, gl.load(of_left + (ahead + o + 1) % PENDING * EACH, mask=o + 1 < count, other=0.0)


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
def sum_of(left, right):
    return left + right


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
def _gate_and_store(read, opened, weight, out, out_scales, row, rows, head, j, eps, V_HEADS: gl.constexpr):
    """One head of a row, see `delta_parts.gate_and_store`."""
    dtype: gl.constexpr = weight.dtype
    wide = read.to(dtype).to(gl.float32)
    factor = gl.rsqrt(gl.sum(wide * wide, 0) / _DIM + eps)
    normed = (weight * (wide * factor).to(dtype)).to(gl.float32)
    gated = (normed * opened).to(dtype)
    spot = out + row.to(gl.int64) * (V_HEADS * _DIM) + head * _DIM + j
    if out_scales is not None:
        scale = gl.maximum(gl.max(gl.abs(gated.to(gl.float32)), 0), 1e-10) / _LARGEST
        gl.store(spot, (gated.to(gl.float32) / scale).to(out.dtype.element_ty))
        gl.store(out_scales + head.to(gl.int64) * rows + row, scale)
    else:
        gl.store(spot, gated)


@gluon.jit
def _weigh(left, weights):
    """How much is left of each update that stands, which is stored, and of the state before them."""
    by_each, by_next = left
    weights.store(gl.exp(gl.associative_scan(by_next, 0, sum_of, reverse=True)))
    return gl.exp(gl.sum(by_each, 0))


@gluon.jit
def _write_rows(
    spot, stage, log, first, count, weights, rest, position, begin, TURN: gl.constexpr, layout: gl.constexpr
):
    """Rows of a state in shared memory with so many updates, which are made some at a turn, to where they came from."""
    TILE: gl.constexpr = 4 * gl.num_warps()
    PARTS: gl.constexpr = 2 * _DIM // TILE
    parts = seen_as(log, gl.float32, [log.shape[0] * log.shape[1] * PARTS, TILE])
    entries = seen_as(log, gl.float32, [log.shape[0] * log.shape[1], 2 * _DIM])
    i, j = gl.arange(0, TILE, gl.SliceLayout(1, layout)), gl.arange(0, _DIM, gl.SliceLayout(0, layout))
    for piece in gl.static_range(stage.shape[0] // TILE):
        tile = begin // TILE + piece
        state = stage.slice(piece * TILE, TILE, 0).load(layout).to(gl.float32)
        state = gl.where(position > 0, state * rest, 0.0)
        for turn in range(0, count, TURN):
            for o in gl.static_range(TURN):
                entry = first + turn + o
                k = parts.index(entry * PARTS + tile).load(gl.SliceLayout(1, layout)) * number_of(weights, turn + o)
                moved = entries.index(entry).slice(_DIM, _DIM, 0).load(gl.SliceLayout(0, layout))
                state += k[:, None] * moved[None, :]
        rows = spot + (tile * TILE + i)[:, None] * _DIM + j[None, :]
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
    TURN: gl.constexpr = min(E, 8)
    NARROW: gl.constexpr = tiles.dtype.primitive_bitwidth == 16
    in_tiles: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [WARPS // 4, 4], [1, 0])
    of_tile: gl.constexpr = gl.SliceLayout(1, in_tiles)
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 16])
    by_part: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    by_move: gl.constexpr = gl.BlockedLayout([TURN, 4], [1, 32], [WARPS, 1], [1, 0])
    everywhere: gl.constexpr = gl.SliceLayout(0, by_move)
    of_log: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    vectors: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    cuda.gdc_launch_dependents()
    first, programs, units = gl.program_id(0), gl.num_programs(0), count * V_HEADS
    own = gl.cdiv(units - first, programs)

    stages = gl.allocate_shared_memory(tiles.dtype, [STAGES, ROWS, _DIM], tiles.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    log = gl.allocate_shared_memory(gl.float32, [2, E, 2 * _DIM], matrix)
    places_of = gl.allocate_shared_memory(gl.int32, [_HEADS_AT_ONCE], vectors)
    positions_of = gl.allocate_shared_memory(gl.int32, [_HEADS_AT_ONCE], vectors)
    begins_of = gl.allocate_shared_memory(gl.int32, [_HEADS_AT_ONCE], vectors)
    decays_of = gl.allocate_shared_memory(gl.float32, [_HEADS_AT_ONCE], vectors)
    betas_of = gl.allocate_shared_memory(gl.float32, [_HEADS_AT_ONCE], vectors)
    places = seen_as(places_of, gl.int32, [_HEADS_AT_ONCE, 1])
    at_positions = seen_as(positions_of, gl.int32, [_HEADS_AT_ONCE, 1])
    begin_at = seen_as(begins_of, gl.int32, [_HEADS_AT_ONCE, 1])
    decay_by = seen_as(decays_of, gl.float32, [_HEADS_AT_ONCE, 1])
    beta_by = seen_as(betas_of, gl.float32, [_HEADS_AT_ONCE, 1])
    parts = gl.allocate_shared_memory(gl.float32, [4, _DIM], matrix)
    part_of = seen_as(parts, gl.float32, [4, _DIM])
    if NARROW:
        halves = gl.allocate_shared_memory(tiles.dtype, [8, _DIM], tiles.layout)
    read_by_query = gl.allocate_shared_memory(gl.float32, [_DIM], vectors)
    read_by_key = gl.allocate_shared_memory(gl.float32, [_DIM], vectors)
    met_by_query = gl.allocate_shared_memory(gl.float32, [E], vectors)
    met_by_key = gl.allocate_shared_memory(gl.float32, [E], vectors)
    weights_of = gl.allocate_shared_memory(gl.float32, [E], vectors)
    weights = seen_as(weights_of, gl.float32, [E, 1])

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

    part, i = gl.arange(0, 4, gl.SliceLayout(1, by_part)), gl.arange(0, _DIM, gl.SliceLayout(0, by_part))
    j = gl.arange(0, _DIM, everywhere)
    weight = gl.load(norm + j)
    row, head = first // V_HEADS, first % V_HEADS
    place, position = number_of(places, 0), number_of(at_positions, 0)
    left = _ask_updates(
        updates, log.index(0), place, head, number_of(begin_at, 0), position, V_HEADS, PENDING, of_log
    )  # fmt: skip
    channel = _first_channel(part, head, K_HEADS, V_HEADS)[:, None] + i[None, :]
    kept = _ask_kept(taps, columns, place, position, head, channel, K_HEADS, V_HEADS, RING, by_part)
    cuda.gdc_wait()
    new = gl.load(qkvz + row.to(gl.int64) * stride + channel)
    decay_of, beta_of = _rates_of(rates, decays, decay_bias, row_of, head_of, known, V_HEADS)
    decays_of.store(decay_of)
    betas_of.store(beta_of)

    for number in range(own):
        async_copy.wait_group(0)
        rest = _weigh(left, weights_of)
        made = _made(kept, new, scale, by_part)
        parts.store(made)
        if NARROW:
            upper = made.to(tiles.dtype)
            both = gl.join(upper, (made - upper.to(gl.float32)).to(tiles.dtype))
            halves.store(gl.reshape(gl.permute(both, (2, 0, 1)), [8, _DIM]))
            fence_async_shared()
        all_threads()
        buffer = number & 1
        place, position, begins = (
            number_of(places, number),
            number_of(at_positions, number),
            number_of(begin_at, number),
        )
        decay, beta = number_of(decay_by, number), number_of(beta_by, number)
        row, head = (first + number * programs) // V_HEADS, (first + number * programs) % V_HEADS
        keeps = place != spare
        is_kept = keeps & ((part == 2) | (part < 2) & (head % SHARED == 0))
        ring = columns + (place.to(gl.int64) * RING + position % RING) * CHANNELS
        gl.store(ring + channel, new, mask=is_kept[:, None])

        update = updates + place.to(gl.int64) * (PENDING * EACH) + position % PENDING * EACH + head * (2 * _DIM + 1)
        q, k = part_of.index(0).load(everywhere), part_of.index(1).load(everywhere)
        gl.store(update + j, k, mask=keeps)
        own_met = gl.sum(q * k, 0)
        v, opened = part_of.index(2).load(everywhere), part_of.index(3).load(everywhere)
        keys = log.index(buffer).slice(0, _DIM, 1).load(by_part) * weights_of.load(gl.SliceLayout(1, by_part))[:, None]
        met_by_query.store(gl.sum(keys * part_of.index(0).load(gl.SliceLayout(0, by_part))[None, :], 1))
        met_by_key.store(gl.sum(keys * part_of.index(1).load(gl.SliceLayout(0, by_part))[None, :], 1))
        moves = log.index(buffer).slice(_DIM, _DIM, 1).load(by_move)
        all_threads()
        old_by_query = gl.sum(moves * met_by_query.load(gl.SliceLayout(1, by_move))[:, None], 0)
        old_by_key = gl.sum(moves * met_by_key.load(gl.SliceLayout(1, by_move))[:, None], 0)

        following = gl.minimum(number + 1, own - 1)
        next_unit = first + following * programs
        next_row, next_head = next_unit // V_HEADS, next_unit % V_HEADS
        next_place, next_position = number_of(places, following), number_of(at_positions, following)
        channel = _first_channel(part, next_head, K_HEADS, V_HEADS)[:, None] + i[None, :]
        kept = _ask_kept(taps, columns, next_place, next_position, next_head, channel, K_HEADS, V_HEADS, RING, by_part)
        new = gl.load(qkvz + next_row.to(gl.int64) * stride + channel)
        left = _ask_updates(
            updates, log.index(1 - buffer), next_place, next_head, number_of(begin_at, following), next_position,
            V_HEADS, PENDING, of_log,
        )  # fmt: skip

        makes_updates = keeps & ((position == 0) | (position + NEXT > begins + PENDING))
        spot = states + (place.to(gl.int64) * V_HEADS + head) * (_DIM * _DIM)
        if NARROW:
            sums = gl.zeros([_DIM, 8], gl.float32, of_sums)
        else:
            by_query = gl.zeros([TILE, _DIM], gl.float32, in_tiles)
            by_key = gl.zeros([TILE, _DIM], gl.float32, in_tiles)
        for c in gl.static_range(CHUNKS):
            chunk = number * CHUNKS + c
            stage = stages.index(chunk % STAGES)
            mbarrier.wait(filled.index(chunk % STAGES), chunk // STAGES & 1)
            if NARROW:
                sums = warpgroup_mma(stage.permute((1, 0)), halves.slice(c * ROWS, ROWS, 1).permute((1, 0)), sums)
            else:
                for piece in gl.static_range(ROWS // TILE):
                    state = stage.slice(piece * TILE, TILE, 0).load(in_tiles)
                    by_query += state * part_of.index(0).slice(c * ROWS + piece * TILE, TILE, 0).load(of_tile)[:, None]
                    by_key += state * part_of.index(1).slice(c * ROWS + piece * TILE, TILE, 0).load(of_tile)[:, None]
            if makes_updates:
                _write_rows(
                    spot, stage, log, buffer * E, position - begins, weights, rest, position, c * ROWS, TURN, in_tiles
                )  # fmt: skip
            if c == CHUNKS - 1:
                if NARROW:
                    column = gl.arange(0, 8, gl.SliceLayout(0, of_sums))[None, :]
                    read_by_query.store(gl.sum(gl.where(column % 4 == 0, sums, 0.0), 1))
                    read_by_key.store(gl.sum(gl.where(column % 4 == 1, sums, 0.0), 1))
                else:
                    read_by_query.store(gl.sum(by_query, 0))
                    read_by_key.store(gl.sum(by_key, 0))
            all_threads()
            copy_rows(tiles, stages, filled, places, chunk + STAGES, first, programs, own, V_HEADS, STAGES)
        if makes_updates:
            gl.store(since + (place.to(gl.int64) * V_HEADS + head) * _DIM + j, j * 0 + position)
        begun = position > 0
        from_query = gl.where(begun, read_by_query.load(everywhere) * rest, 0.0) + old_by_query
        from_key = gl.where(begun, read_by_key.load(everywhere) * rest, 0.0) + old_by_key
        fade = gl.exp(decay)
        moved = (v - from_key * fade) * beta
        read = from_query * fade + own_met * moved

        gl.store(update + _DIM + j, moved, mask=keeps)
        gl.store(update + 2 * _DIM, decay, mask=keeps)
        _gate_and_store(read, opened, weight, out, out_scales, row, rows, head, j, eps, V_HEADS)
    async_copy.wait_group(0)


def copies_of(entries: int, number_bytes: int) -> tuple[int, int]:
    """The rows of a state that are copied at once, and how many such copies a program has room for.

    Beside them are updates, twice, and small things.
    """
    small = 4 * (5 * HEADS_AT_ONCE + 6 * DIM + 3 * entries) + 16 * DIM + SMALL_BYTES
    room = SHARED_BYTES // TOGETHER - SYSTEM_BYTES - 2 * entries * 2 * DIM * 4 - small
    size = COPY_BYTES if room >= 2 * COPY_BYTES else COPY_BYTES // 2
    return size // (DIM * number_bytes), room // size


def tiles_of(states: Tensor, rows: int) -> TensorDescriptor:
    """States as they are copied."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * states.element_size(), rank=2)
    return TensorDescriptor.from_tensor(states.view(-1, DIM), [rows, DIM], layout)


def is_streamed(net: DeltaWeights, states: Tensor) -> bool:
    """On a GPU that has the instructions, of heads that this is written for."""
    fits = net.k_dim == net.v_dim == DIM and net.taps.shape[1] == KERNEL
    return fits and states.is_cuda and multiprocessors(states.device) > 0


def step(
    qkvz: Tensor, rates: Tensor, net: DeltaWeights, states: Tensor, columns: Tensor, pending: PendingUpdates,
    decode: DecodeRows, out: Tensor | Quantised,
) -> None:  # fmt: skip
    """One token of each row, which is the only one of its sequence."""
    values, scales = out if isinstance(out, Quantised) else (out, None)
    rows, entries = len(decode.positions), triton.next_power_of_2(pending.tokens)
    units = rows * net.v_heads
    at_once, stages = copies_of(entries, states.element_size())
    programs = max(TOGETHER * multiprocessors(states.device), triton.cdiv(units, HEADS_AT_ONCE))
    stream_states[(min(programs, units),)](
        tiles_of(states, at_once), qkvz, rates, net.taps, net.decay, net.decay_bias, net.norm, states, columns,
        pending.updates, pending.since, decode.slots, decode.positions, values, scales, rows, len(qkvz), qkvz.stride(0),
        len(decode.tables) - 1, net.eps, net.k_dim**-0.5, K_HEADS=net.k_heads, V_HEADS=net.v_heads,
        RING=columns.shape[1], PENDING=pending.tokens, NEXT=1 + pending.most, E=entries, STAGES=stages,
        num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
