"""Gated delta nets: a few tokens of each of any number of sequences, for Hopper: states stream through shared memory.

As in `delta_stream`, but a state is read once for all tokens of its sequence: what they change of it is added to what
those behind them have read. The vectors of tokens are tensors with a token to a warp, where one token alone is
computed by each warp: both in one kernel would share little but their copies.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra import cuda

from phalanx.kernels.delta_weights import DeltaWeights, PendingUpdates
from phalanx.kernels.fp8 import LARGEST, Quantised
from phalanx.kernels.gpu.delta_stream import (
    DIM,
    KERNEL,
    TOGETHER,
    WARPS,
    copy_rows,
    number_of,
    seen_as,
    sigmoid,
    silu,
    softplus,
    sum_of,
    taps_of,
    tiles_of,
)
from phalanx.kernels.gpu.stream import SHARED_BYTES, SYSTEM_BYTES, all_threads, multiprocessors
from phalanx.kernels.tiling import DecodeRows

MOST_TOKENS = 4
"""Of a sequence: there are as many warps."""

HEADS_AT_ONCE = 32
"""Heads of which a program looks up at the start where they are; with more there are more programs."""

ROWS_AT_ONCE = 128
"""Of which it is looked up at once which of them begin a sequence. This is done by every program: to be told by a
kernel ahead they would have to wait for that one.
"""

COPY_ROWS = 64
"""Of a state at once."""

SMALL_BYTES = 2560
"""For barriers, and for what threads exchange when they sum up or deal numbers anew."""

_DIM, _HEADS_AT_ONCE, _ROWS_AT_ONCE = gl.constexpr(DIM), gl.constexpr(HEADS_AT_ONCE), gl.constexpr(ROWS_AT_ONCE)
_LARGEST = gl.constexpr(LARGEST)


@gluon.jit
def _and(some, another):
    """A tuple with one more."""
    return some + (another,)  # noqa: RUF005


@gluon.jit
def _first_rows(slots, rows, spare, sequence, layout: gl.constexpr):
    """The first row of each of some sequences, by their numbers, and how many sequences there are.

    That is as many rows as lie before it: those up to which no more sequences have begun than there are before.
    """
    r = gl.arange(0, _ROWS_AT_ONCE, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    first_row, begun = sequence * 0, rows * 0
    for base in range(0, rows, _ROWS_AT_ONCE):
        row = base + r
        place = gl.load(slots + row, mask=row < rows, other=-1)
        ahead = gl.load(slots + row - 1, mask=(row > 0) & (row < rows), other=-1)
        begins = ((row < rows) & ((place != ahead) | (place == spare))).to(gl.int32)
        reached = gl.where(row < rows, begun + gl.associative_scan(begins, 0, sum_of), 2**30)
        reached = gl.convert_layout(reached, gl.SliceLayout(1, layout))
        first_row += gl.sum((reached[:, None] <= sequence[None, :]).to(gl.int32), 0)
        begun += gl.sum(begins, 0)
    return first_row, begun


@gluon.jit
def _copy_entries(
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
def _find_channels(
    taps, columns, qkvz, place, position, row, at, i, t, stride, CHANNELS: gl.constexpr, RING: gl.constexpr
):
    """Of some channels where the convolution of each token looks, oldest first, [tokens, channels], and its taps.

    Tokens before this step are kept; those of this step are rows.
    """
    tap = gl.arange(0, 4 * _DIM, gl.BlockedLayout([16], [32], [gl.num_warps()], [0]))
    ring = columns + place.to(gl.int64) * (RING * CHANNELS) + at + i
    given = qkvz + row.to(gl.int64) * stride + at + i
    spots = ()
    for nearer in gl.static_range(4):
        of_step = t + (nearer - 3)
        kept = ring[None, :] + ((position + of_step + RING) % RING * CHANNELS)[:, None]
        of_row = given[None, :] + (of_step * stride)[:, None]
        spots = _and(spots, gl.where((of_step >= 0)[:, None], of_row, kept))
    return spots, gl.load(taps + at * 4 + tap)


@gluon.jit
def _find_all(
    taps, columns, qkvz, rates, decays, decay_bias, place, position, row, head, i, t, stride,
    K_HEADS: gl.constexpr, V_HEADS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Where query, key and value of a head, its gates and its rates are, with what only depends on the head."""
    CHANNELS: gl.constexpr = (2 * K_HEADS + V_HEADS) * _DIM
    key = head // (V_HEADS // K_HEADS)
    k_at, v_at = (K_HEADS + key) * _DIM, (2 * K_HEADS + head) * _DIM
    q = _find_channels(taps, columns, qkvz, place, position, row, key * _DIM, i, t, stride, CHANNELS, RING)
    k = _find_channels(taps, columns, qkvz, place, position, row, k_at, i, t, stride, CHANNELS, RING)
    v = _find_channels(taps, columns, qkvz, place, position, row, v_at, i, t, stride, CHANNELS, RING)
    each = (row + t).to(gl.int64)
    gates = qkvz + each[:, None] * stride + (CHANNELS + head * _DIM + i)[None, :]
    own = rates + each * (2 * V_HEADS) + head, gl.load(decay_bias + head), gl.load(decays + head)
    return q, k, v, gates, own


@gluon.jit
def _ask_channels(found, position, count, t):
    """What the convolution looks at, and its taps."""
    spots, taps = found
    seen = ()
    for nearer in gl.static_range(4):
        known = (t < count) & (position + t + (nearer - 3) >= 0)
        seen = _and(seen, gl.load(spots[nearer], mask=known[:, None], other=0.0))
    return seen, taps


@gluon.jit
def _ask_all(found, position, count, t, V_HEADS: gl.constexpr):
    """What was found of so many tokens, [tokens, channels], and what their rates come from."""
    q, k, v, gates, own = found
    rates, bias, decay = own
    asked_q, asked_k = _ask_channels(q, position, count, t), _ask_channels(k, position, count, t)
    asked_v, gate = _ask_channels(v, position, count, t), gl.load(gates, mask=(t < count)[:, None], other=0.0)
    fast = gl.load(rates, mask=t < count, other=0.0)
    return asked_q, asked_k, asked_v, gate, (fast, gl.load(rates + V_HEADS, mask=t < count, other=0.0), bias, decay)


@gluon.jit
def _convolved(asked, layout: gl.constexpr):
    """What the convolution makes of some channels of tokens, in float32 what the model's dtype holds."""
    seen, taps = asked
    third, second, last, new = seen
    third_tap, second_tap, last_tap, own_tap = taps_of(taps, [_DIM], layout)
    total = third.to(gl.float32) * third_tap[None, :] + second.to(gl.float32) * second_tap[None, :]
    total += last.to(gl.float32) * last_tap[None, :]
    total += new.to(gl.float32) * own_tap[None, :]
    return silu(total.to(new.dtype).to(gl.float32)).to(new.dtype).to(gl.float32)


@gluon.jit
def _nothing(TOKENS: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Zeros of each token."""
    made = ()
    for _ in gl.static_range(TOKENS):
        made = _and(made, gl.zeros(shape, gl.float32, layout))
    return made


@gluon.jit
def _tile_of(stage, piece, TILE: gl.constexpr, layout: gl.constexpr):
    """A tile of a state in shared memory, in float32."""
    return stage.slice(piece * TILE, TILE, 0).load(layout).to(gl.float32)


@gluon.jit
def _read_rows(read, state, turned, tile, TOKENS: gl.constexpr, in_tiles: gl.constexpr, layout: gl.constexpr):
    """What each token reads, with what it reads of a tile of a state; a thread sums up the rows that it has."""
    TILE: gl.constexpr = state.shape[0]
    more = ()
    for t in gl.static_range(TOKENS):
        by = turned.index(t * (_DIM // TILE) + tile).load(gl.SliceLayout(1, in_tiles))
        parts = gl.sum(gl.reshape(state * by[:, None], [TILE // 4, 4, _DIM]), 1)
        more = _and(more, read[t] + gl.convert_layout(parts, layout, assert_trivial=True))
    return more


@gluon.jit
def _write_tile(
    spot, state, entries, parts, fades, begins, position, buffer, tile, PENDING: gl.constexpr, E: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """A tile of a state with the updates that stand, to where it came from."""
    TILE: gl.constexpr = state.shape[0]
    OF_KEY: gl.constexpr = _DIM // TILE
    i, j = gl.arange(0, TILE, gl.SliceLayout(1, layout)), gl.arange(0, _DIM, gl.SliceLayout(0, layout))
    state = gl.where(position > 0, state, 0.0)
    for at in range(begins, position):
        number = at % PENDING
        entry = buffer * E + number
        k = parts.index(entry * 2 * OF_KEY + tile).load(gl.SliceLayout(1, layout))
        moved = entries.index(entry).slice(_DIM, _DIM, 0).load(gl.SliceLayout(0, layout))
        state = state * number_of(fades, number) + k[:, None] * moved[None, :]
    gl.store(spot + (i + tile * TILE)[:, None] * _DIM + j[None, :], state.to(spot.dtype.element_ty))


@gluon.jit
def _behind(read, moved, fade, met, at, WIDTH: gl.constexpr, TOKENS: gl.constexpr):
    """What each token reads behind an update, whose key it met so far."""
    after = ()
    for t in gl.static_range(TOKENS):
        after = _and(after, read[t] * fade + moved * number_of(met, t * WIDTH + at))
    return after


@gluon.jit
def _with_state(old, summed, rest, position, TOKENS: gl.constexpr):
    """What tokens read of updates along with what they read of the state before these, of which so much is left."""
    made = ()
    for t in gl.static_range(TOKENS):
        made = _and(made, gl.where(position > 0, gl.sum(summed[t], 0) * rest, 0.0) + old[t])
    return made


@gluon.jit
def _met(turned, keys, into, layout: gl.constexpr):
    """How far each token meets each of some keys, [tokens, keys]."""
    each = turned.load(gl.SliceLayout(1, layout))
    into.store(gl.sum(each[:, None, :] * keys[None, :, :], 2))


@gluon.jit
def _by_token(vectors, TOKENS: gl.constexpr, layout: gl.constexpr):
    """Those of all tokens as one, [tokens, columns]."""
    made = gl.permute(gl.join(vectors[0], vectors[1]), (1, 0))
    if TOKENS == 4:
        upper = gl.join(gl.join(vectors[0], vectors[1]), gl.join(vectors[2], vectors[3]))
        made = gl.reshape(gl.permute(upper, (2, 1, 0)), [4, _DIM])
    return gl.convert_layout(made, layout)


@gluon.jit
def _gate_and_store(read, gate, weight, out, out_scales, row, t, count, rows, head, i, eps, V_HEADS: gl.constexpr):
    """One head of the tokens of a sequence, see `delta_parts.gate_and_store`."""
    wide = read.to(gate.dtype).to(gl.float32)
    factor = gl.rsqrt(gl.sum(wide * wide, 1) / _DIM + eps)
    normed = (weight[None, :] * (wide * factor[:, None]).to(gate.dtype)).to(gl.float32)
    gated = (normed * silu(gate.to(gl.float32))).to(gate.dtype)
    known, each = t < count, (row + t).to(gl.int64)
    spots = out + each[:, None] * (V_HEADS * _DIM) + (head * _DIM + i)[None, :]
    if out_scales is not None:
        scale = gl.maximum(gl.max(gl.abs(gated.to(gl.float32)), 1), 1e-10) / _LARGEST
        gl.store(spots, (gated.to(gl.float32) / scale[:, None]).to(out.dtype.element_ty), mask=known[:, None])
        gl.store(out_scales + head.to(gl.int64) * rows + each, scale, mask=known)
    else:
        gl.store(spots, gated, mask=known[:, None])


@gluon.jit(do_not_specialize=["count", "rows", "spare"], do_not_specialize_on_alignment=["slots", "positions"])
def stream_drafts(
    tiles, qkvz, rates, taps, decays, decay_bias, norm, states, columns, updates, since, slots, positions, out,
    out_scales, count, rows, stride, spare, eps, scale, K_HEADS: gl.constexpr, V_HEADS: gl.constexpr,
    RING: gl.constexpr, PENDING: gl.constexpr, NEXT: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Value heads of the sequences of `count` rows, of which each has up to `TOKENS`. See `delta._decode`.

    A state is read along with the updates that are pending, whether they are made then or not. A program makes those of
    its first state before the kernel ahead has ended.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = tiles.block_shape[0]
    CHUNKS: gl.constexpr = _DIM // ROWS
    TILE: gl.constexpr = 4 * WARPS
    PIECES: gl.constexpr = ROWS // TILE
    CHANNELS: gl.constexpr = (2 * K_HEADS + V_HEADS) * _DIM
    SHARED: gl.constexpr = V_HEADS // K_HEADS
    EACH: gl.constexpr = V_HEADS * (2 * _DIM + 1)
    in_tiles: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [WARPS // 4, 4], [1, 0])
    summed: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS // 4, 4], [1, 0])
    by_column: gl.constexpr = gl.SliceLayout(0, summed)
    by_token: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    by_key: gl.constexpr = gl.BlockedLayout([TOKENS, 1, 4], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])
    by_row: gl.constexpr = gl.BlockedLayout([_ROWS_AT_ONCE // WARPS, 1], [1, 32], [WARPS, 1], [1, 0])
    by_head: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    vectors: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    cuda.gdc_launch_dependents()
    first, programs = gl.program_id(0), gl.num_programs(0)

    stages = gl.allocate_shared_memory(tiles.dtype, [STAGES, ROWS, _DIM], tiles.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    log = gl.allocate_shared_memory(gl.float32, [2, E, 2 * _DIM], matrix)
    entries = seen_as(log, gl.float32, [2 * E, 2 * _DIM])
    parts = seen_as(log, gl.float32, [2 * E * 2 * _DIM // TILE, TILE])
    places_of = gl.allocate_shared_memory(gl.int32, [_HEADS_AT_ONCE], vectors)
    positions_of = gl.allocate_shared_memory(gl.int32, [_HEADS_AT_ONCE], vectors)
    begins_of = gl.allocate_shared_memory(gl.int32, [_HEADS_AT_ONCE], vectors)
    rows_of = gl.allocate_shared_memory(gl.int32, [_HEADS_AT_ONCE], vectors)
    counts_of = gl.allocate_shared_memory(gl.int32, [_HEADS_AT_ONCE], vectors)
    decays_of = gl.allocate_shared_memory(gl.float32, [TOKENS], vectors)
    betas_of = gl.allocate_shared_memory(gl.float32, [TOKENS], vectors)
    places = seen_as(places_of, gl.int32, [_HEADS_AT_ONCE, 1])
    at_positions = seen_as(positions_of, gl.int32, [_HEADS_AT_ONCE, 1])
    begin_at = seen_as(begins_of, gl.int32, [_HEADS_AT_ONCE, 1])
    row_by = seen_as(rows_of, gl.int32, [_HEADS_AT_ONCE, 1])
    count_by = seen_as(counts_of, gl.int32, [_HEADS_AT_ONCE, 1])
    decay_by = seen_as(decays_of, gl.float32, [TOKENS, 1])
    beta_by = seen_as(betas_of, gl.float32, [TOKENS, 1])
    queries = gl.allocate_shared_memory(gl.float32, [TOKENS, _DIM], matrix)
    keys = gl.allocate_shared_memory(gl.float32, [TOKENS, _DIM], matrix)
    values = gl.allocate_shared_memory(gl.float32, [TOKENS, _DIM], matrix)
    query_parts = seen_as(queries, gl.float32, [TOKENS * _DIM // TILE, TILE])
    key_parts = seen_as(keys, gl.float32, [TOKENS * _DIM // TILE, TILE])
    value_of = seen_as(values, gl.float32, [TOKENS, _DIM])
    fades_of = gl.allocate_shared_memory(gl.float32, [E], vectors)
    fades = seen_as(fades_of, gl.float32, [E, 1])
    met_by_keys = gl.allocate_shared_memory(gl.float32, [TOKENS, E], matrix)
    met_by_queries = gl.allocate_shared_memory(gl.float32, [TOKENS, E], matrix)
    own_by_keys = gl.allocate_shared_memory(gl.float32, [TOKENS, TOKENS], matrix)
    own_by_queries = gl.allocate_shared_memory(gl.float32, [TOKENS, TOKENS], matrix)
    old_keys = seen_as(met_by_keys, gl.float32, [TOKENS * E, 1])
    old_queries = seen_as(met_by_queries, gl.float32, [TOKENS * E, 1])
    own_keys = seen_as(own_by_keys, gl.float32, [TOKENS * TOKENS, 1])
    own_queries = seen_as(own_by_queries, gl.float32, [TOKENS * TOKENS, 1])
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
    fence_async_shared()

    n = gl.arange(0, _HEADS_AT_ONCE, gl.SliceLayout(0, by_row))
    row_of, sequences = _first_rows(slots, count, spare, (first + n * programs) // V_HEADS, by_row)
    units = sequences * V_HEADS
    own = gl.cdiv(gl.maximum(units - first, 0), programs)
    row_of = gl.convert_layout(row_of, gl.SliceLayout(0, by_head), assert_trivial=True)
    unit = first + gl.arange(0, _HEADS_AT_ONCE, gl.SliceLayout(0, by_head)) * programs
    known, head_of = unit < units, unit % V_HEADS
    place_of = gl.load(slots + row_of, mask=known, other=0).to(gl.int32)
    position_of = gl.load(positions + row_of, mask=known, other=0).to(gl.int32)
    t_by_head = gl.arange(0, TOKENS, gl.SliceLayout(1, by_head))
    each_row = row_of[None, :] + t_by_head[:, None]
    slot_of = gl.load(slots + each_row, mask=known[None, :] & (each_row < count), other=-1).to(gl.int32)
    count_of = gl.sum((slot_of == place_of[None, :]).to(gl.int32), 0)
    count_of = gl.where(known & (place_of == spare), 1, count_of)
    places_of.store(place_of)
    positions_of.store(position_of)
    rows_of.store(row_of)
    counts_of.store(count_of)
    all_threads()
    for i in gl.static_range(STAGES):
        copy_rows(tiles, stages, filled, places, i, first, programs, own, V_HEADS, STAGES)
    reached = gl.load(since + (place_of.to(gl.int64) * V_HEADS + head_of) * _DIM, mask=known, other=0)
    begins_of.store(gl.minimum(gl.maximum(reached, position_of - PENDING), position_of))
    all_threads()

    t, i = gl.arange(0, TOKENS, gl.SliceLayout(1, by_token)), gl.arange(0, _DIM, gl.SliceLayout(0, by_token))
    j = gl.arange(0, _DIM, by_column)
    e, w = gl.arange(0, E, flat), gl.arange(0, 2 * _DIM, flat)
    weight = gl.load(norm + i)
    head, row, tokens = first % V_HEADS, number_of(row_by, 0), number_of(count_by, 0)
    place, position, begins = number_of(places, 0), number_of(at_positions, 0), number_of(begin_at, 0)
    left = _copy_entries(updates, entries, place, head, begins, position, 0, e, w, V_HEADS, PENDING, E)
    found = _find_all(
        taps, columns, qkvz, rates, decays, decay_bias, place, position, row, head, i, t, stride, K_HEADS, V_HEADS, RING
    )
    async_copy.wait_group(0)
    fades_of.store(gl.exp(left))
    all_threads()
    if (own > 0) & (place != spare) & ((position == 0) | (position + NEXT > begins + PENDING)):
        spot = states + (place.to(gl.int64) * V_HEADS + head) * (_DIM * _DIM)
        for c in range(CHUNKS):
            mbarrier.wait(filled.index(c), 0)
            for piece in gl.static_range(PIECES):
                state, tile = _tile_of(stages.index(c), piece, TILE, in_tiles), c * PIECES + piece
                _write_tile(spot, state, entries, parts, fades, begins, position, 0, tile, PENDING, E, in_tiles)
        gl.store(since + (place.to(gl.int64) * V_HEADS + head) * _DIM + j, j * 0 + position)
    cuda.gdc_wait()
    q_asked, k_asked, v_asked, gate, rates_asked = _ask_all(found, position, tokens, t, V_HEADS)

    for number in range(own):
        if number > 0:
            async_copy.wait_group(0)
            fades_of.store(gl.exp(left))
        buffer = number & 1
        place, position, begins = (
            number_of(places, number),
            number_of(at_positions, number),
            number_of(begin_at, number),
        )
        row, tokens = number_of(row_by, number), number_of(count_by, number)
        head = (first + number * programs) % V_HEADS
        key = head // SHARED

        keeps = place != spare
        kept = (t < tokens) & keeps
        ring = columns + (place.to(gl.int64) * RING + (position + t) % RING)[:, None] * CHANNELS + i[None, :]
        of_key = (kept & (head % SHARED == 0))[:, None]
        gl.store(ring + key * _DIM, q_asked[0][3], mask=of_key)
        gl.store(ring + (K_HEADS + key) * _DIM, k_asked[0][3], mask=of_key)
        gl.store(ring + (2 * K_HEADS + head) * _DIM, v_asked[0][3], mask=kept[:, None])
        q, k = _convolved(q_asked, gl.SliceLayout(0, by_token)), _convolved(k_asked, gl.SliceLayout(0, by_token))
        q = q * gl.rsqrt(gl.sum(q * q, 1) + 1e-6)[:, None] * scale
        k = k * gl.rsqrt(gl.sum(k * k, 1) + 1e-6)[:, None]
        queries.store(q)
        keys.store(k)
        values.store(_convolved(v_asked, gl.SliceLayout(0, by_token)))
        fast, slow, bias, decay = rates_asked
        decay = -gl.exp(decay) * softplus(slow.to(gl.float32) + bias)
        decays_of.store(decay)
        betas_of.store(sigmoid(fast))
        all_threads()
        own_found = keys.load(gl.SliceLayout(0, by_key))
        old_found = log.index(buffer).slice(0, _DIM, 1).load(gl.SliceLayout(0, by_key))
        _met(keys, old_found, met_by_keys, by_key)
        _met(queries, old_found, met_by_queries, by_key)
        _met(keys, own_found, own_by_keys, by_key)
        _met(queries, own_found, own_by_queries, by_key)
        all_threads()

        next_gate = gate
        if number + 1 < own:
            next_head, next_row = (first + (number + 1) * programs) % V_HEADS, number_of(row_by, number + 1)
            next_place, next_position = number_of(places, number + 1), number_of(at_positions, number + 1)
            next_found = _find_all(
                taps, columns, qkvz, rates, decays, decay_bias, next_place, next_position, next_row, next_head, i, t,
                stride, K_HEADS, V_HEADS, RING,
            )  # fmt: skip
            q_asked, k_asked, v_asked, next_gate, rates_asked = _ask_all(
                next_found, next_position, number_of(count_by, number + 1), t, V_HEADS
            )
            left = _copy_entries(
                updates, entries, next_place, next_head, number_of(begin_at, number + 1), next_position, 1 - buffer, e,
                w, V_HEADS, PENDING, E,
            )  # fmt: skip

        makes_updates = keeps & (number > 0) & ((position == 0) | (position + NEXT > begins + PENDING))
        spot = states + (place.to(gl.int64) * V_HEADS + head) * (_DIM * _DIM)
        of_keys = _nothing(TOKENS, [TILE // 4, _DIM], summed)
        of_queries = _nothing(TOKENS, [TILE // 4, _DIM], summed)
        for c in range(CHUNKS):
            chunk = number * CHUNKS + c
            stage = stages.index(chunk % STAGES)
            mbarrier.wait(filled.index(chunk % STAGES), chunk // STAGES & 1)
            for piece in gl.static_range(PIECES):
                state, tile = _tile_of(stage, piece, TILE, in_tiles), c * PIECES + piece
                of_keys = _read_rows(of_keys, state, key_parts, tile, TOKENS, in_tiles, summed)
                of_queries = _read_rows(of_queries, state, query_parts, tile, TOKENS, in_tiles, summed)
                if makes_updates:
                    _write_tile(
                        spot, state, entries, parts, fades, begins, position, buffer, tile, PENDING, E, in_tiles
                    )  # fmt: skip
            all_threads()
            copy_rows(tiles, stages, filled, places, chunk + STAGES, first, programs, own, V_HEADS, STAGES)
        if makes_updates:
            gl.store(since + (place.to(gl.int64) * V_HEADS + head) * _DIM + j, j * 0 + position)

        from_keys, from_queries = _nothing(TOKENS, [_DIM], by_column), _nothing(TOKENS, [_DIM], by_column)
        rest = 1.0
        for at in range(begins, position):
            entry = at % PENDING
            moved, fade = (
                entries.index(buffer * E + entry).slice(_DIM, _DIM, 0).load(by_column),
                number_of(fades, entry),
            )
            from_keys = _behind(from_keys, moved, fade, old_keys, entry, E, TOKENS)
            from_queries = _behind(from_queries, moved, fade, old_queries, entry, E, TOKENS)
            rest *= fade
        from_keys = _with_state(from_keys, of_keys, rest, position, TOKENS)
        from_queries = _with_state(from_queries, of_queries, rest, position, TOKENS)

        update = updates + place.to(gl.int64) * (PENDING * EACH) + head * (2 * _DIM + 1)
        reads, moves = (), ()
        for s in gl.static_range(TOKENS):
            fade, beta = gl.exp(number_of(decay_by, s)), number_of(beta_by, s)
            moved = (value_of.index(s).load(by_column) - from_keys[s] * fade) * beta
            from_keys = _behind(from_keys, moved, fade, own_keys, s, TOKENS, TOKENS)
            from_queries = _behind(from_queries, moved, fade, own_queries, s, TOKENS, TOKENS)
            reads, moves = _and(reads, from_queries[s]), _and(moves, moved)
        log_of = update + (position + t) % PENDING * EACH
        entry_of = log_of[:, None] + i[None, :]
        gl.store(log_of + 2 * _DIM, decay, mask=kept)
        gl.store(entry_of, k, mask=kept[:, None])
        gl.store(entry_of + _DIM, _by_token(moves, TOKENS, by_token), mask=kept[:, None])
        read = _by_token(reads, TOKENS, by_token)
        _gate_and_store(read, gate, weight, out, out_scales, row, t, tokens, rows, head, i, eps, V_HEADS)
        gate = next_gate


def stages_of(entries: int, tokens: int, number_bytes: int) -> int:
    """How many copies a program has room for beside updates, twice, and small things."""
    tables, found = 5 * HEADS_AT_ONCE, entries + 2 * tokens * (1 + entries + tokens)
    small = 4 * (tables + 3 * tokens * DIM + found) + SMALL_BYTES
    room = SHARED_BYTES // TOGETHER - SYSTEM_BYTES - 2 * entries * 2 * DIM * 4 - small
    return room // (COPY_ROWS * DIM * number_bytes)


def is_streamed(net: DeltaWeights, most: int, updates: int, states: Tensor) -> bool:
    """On a GPU that has the instructions, of heads that this is written for, with few tokens of a sequence, and where
    there is room for a whole state beside so many updates.
    """
    if not (net.k_dim == net.v_dim == DIM and net.taps.shape[1] == KERNEL and 1 < most <= MOST_TOKENS):
        return False
    entries, tokens = triton.next_power_of_2(updates), triton.next_power_of_2(most)
    room = stages_of(entries, tokens, states.element_size()) * COPY_ROWS
    return room >= DIM and states.is_cuda and multiprocessors(states.device) > 0


def step(
    qkvz: Tensor, rates: Tensor, net: DeltaWeights, states: Tensor, columns: Tensor, pending: PendingUpdates,
    decode: DecodeRows, out: Tensor | Quantised,
) -> None:  # fmt: skip
    """The tokens of each sequence, whose rows lie together."""
    values, scales = out if isinstance(out, Quantised) else (out, None)
    rows, entries = len(decode.positions), triton.next_power_of_2(pending.tokens)
    tokens, units = triton.next_power_of_2(pending.most), rows * net.v_heads
    programs = max(TOGETHER * multiprocessors(states.device), triton.cdiv(units, HEADS_AT_ONCE))
    stream_drafts[(min(programs, units),)](
        tiles_of(states, COPY_ROWS), qkvz, rates, net.taps, net.decay, net.decay_bias, net.norm, states, columns,
        pending.updates, pending.since, decode.slots, decode.positions, values, scales, rows, len(qkvz), qkvz.stride(0),
        len(decode.tables) - 1, net.eps, net.k_dim**-0.5, K_HEADS=net.k_heads, V_HEADS=net.v_heads,
        RING=columns.shape[1], PENDING=pending.tokens, NEXT=2 * pending.most, E=entries,
        STAGES=stages_of(entries, tokens, states.element_size()), TOKENS=tokens, num_warps=WARPS,
        launch_pdl=True,
    )  # fmt: skip
