"""Collectives over peer memory: every rank reads what it needs out of the other ranks' areas.

An area belongs to one rank and is mapped by all. Program p of a kernel has its own part of it: a count of its calls, a
line of flags (one for each rank, which that rank's program p raises), and two slots of data. A call copies its input
into slot `count % 2`, raises its flag with every rank, waits for theirs, and reads their slots. Programs of one rank
never wait for each other, so any number of them may be on the GPU at once.

Why two slots suffice: a rank that raised its flag in call n has finished call n - 1, so whoever has passed the meeting
of call n may write the slot of call n - 1, which is that of call n + 1. Counts live on the device and are the program's
own: calls of any size may follow each other, and graphs may be replayed, as long as all ranks make the same calls in
the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.fp8 import GROUP, LARGEST, Activations, Form
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.rows import empty_in, norm_and_store
from phalanx.kernels.gpu.stamps import stamp_begin, stamp_end, taken, taken_by

PROGRAMS = 128
MOST_RANKS = 16
"""More have no flags."""
TILE_BYTES = 4096
"""What 256 threads move with 16 bytes each."""
SLOT_TILES = 16

_LINE: tl.constexpr = tl.constexpr(8 * MOST_RANKS)
_FLAGS: tl.constexpr = tl.constexpr(8 * PROGRAMS)
_SLOTS: tl.constexpr = tl.constexpr(8 * PROGRAMS * (1 + MOST_RANKS))
_SLOT: tl.constexpr = tl.constexpr(SLOT_TILES * TILE_BYTES)

SLOT_BYTES = SLOT_TILES * TILE_BYTES
AREA_BYTES = 8 * PROGRAMS * (1 + MOST_RANKS) + PROGRAMS * 2 * SLOT_BYTES
FLAGS_AT, FLAGS_BYTES = 8 * PROGRAMS, 8 * PROGRAMS * MOST_RANKS


@dataclass(frozen=True)
class Peers:
    """Where each rank's area is in this process's addresses: `table` holds them as int64 on the device."""

    rank: int
    size: int
    table: Tensor


@triton.jit
def _count(areas, rank):
    """How often this program was called before, and where that is kept."""
    kept = tl.load(areas + rank).to(tl.pointer_type(tl.int64)) + tl.program_id(0)
    return tl.load(kept), kept


@triton.jit
def _slot(areas, rank, count, like):
    """This program's slot in a rank's area."""
    at = tl.load(areas + rank) + _SLOTS + (tl.program_id(0) * 2 + count % 2) * _SLOT
    return tl.multiple_of(at.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _meet(areas, rank, stage, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Go on once this program has reached `stage` on every rank; what they wrote before is then seen here.

    Flags only rise. They are raised by one thread behind a barrier: its release covers what all threads wrote.
    """
    tl.debug_barrier()
    peer = tl.arange(0, WIDE)
    exists = peer < SIZE
    line = _FLAGS + tl.program_id(0) * _LINE
    theirs = tl.load(areas + peer, mask=exists, other=0) + line + rank * 8
    reached = tl.full((WIDE,), 0, tl.int64) + stage
    tl.atomic_max(theirs.to(tl.pointer_type(tl.int64)), reached, mask=exists, sem="release", scope="sys")
    own = (tl.load(areas + rank) + line + peer * 8).to(tl.pointer_type(tl.int64))
    nothing = tl.full((WIDE,), 0, tl.int64)
    least = stage - 1
    while least < stage:
        seen = tl.atomic_add(own, nothing, mask=exists, sem="acquire", scope="sys")
        least = tl.min(tl.where(exists, seen, reached), 0)
    tl.debug_barrier()


@triton.jit
def _sum(areas, count, like, place, mask, SIZE: tl.constexpr):
    """What lies at the same place in every rank's slot, added in rank order in float32 and rounded once."""
    total = tl.load(_slot(areas, 0, count, like) + place, mask=mask, other=0.0).to(tl.float32)
    for peer in tl.static_range(1, SIZE):
        total += tl.load(_slot(areas, peer, count, like) + place, mask=mask, other=0.0).to(tl.float32)
    return total.to(like.dtype.element_ty)


@triton.jit(do_not_specialize=["rank"])
def _one_shot(x, areas, rank, elements, stamp, SIZE: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    let_next_start()
    place = tl.arange(0, TILE)
    at = tl.program_id(0) * TILE + place
    mask = at < elements
    wait_for_ahead()
    count, kept = _count(areas, rank)
    stamp_begin(stamp)
    tl.store(_slot(areas, rank, count, x) + place, tl.load(x + at, mask=mask), mask=mask)
    _meet(areas, rank, 2 * count + 1, SIZE, WIDE)
    tl.store(x + at, _sum(areas, count, x, place, mask, SIZE), mask=mask)
    tl.store(kept, count + 1)
    stamp_end(stamp)


@triton.jit(do_not_specialize=["rank", "tiles"])
def _two_shot(
    x, areas, rank, elements, tiles, begins, ends, SIZE: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program's stretch has `tiles` tiles for each rank, which adds those up for all."""
    let_next_start()
    lane = tl.arange(0, TILE)
    first = tl.program_id(0) * SIZE * tiles
    wait_for_ahead()
    count, kept = _count(areas, rank)
    stamp_begin(begins)
    own = _slot(areas, rank, count, x)
    for tile in range(SIZE * tiles):
        at = (first + tile) * TILE + lane
        tl.store(own + tile * TILE + lane, tl.load(x + at, mask=at < elements), mask=at < elements)
    _meet(areas, rank, 2 * count + 1, SIZE, WIDE)
    for tile in range(rank * tiles, (rank + 1) * tiles):
        mask = (first + tile) * TILE + lane < elements
        tl.store(own + tile * TILE + lane, _sum(areas, count, x, tile * TILE + lane, mask, SIZE), mask=mask)
    _meet(areas, rank, 2 * count + 2, SIZE, WIDE)
    for peer in tl.static_range(SIZE):
        theirs = _slot(areas, peer, count, x)
        for tile in range(peer * tiles, (peer + 1) * tiles):
            at = (first + tile) * TILE + lane
            tl.store(x + at, tl.load(theirs + tile * TILE + lane, mask=at < elements), mask=at < elements)
    tl.store(kept, count + 1)
    stamp_end(ends)


@triton.jit(do_not_specialize=["rank", "rows"])
def _one_shot_add_rms_norm(
    x, residual, weight, out, out_fp8, out_scales, areas, rank, rows, width, eps, stamp, SIZE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Whole rows, so that the norm needs no other program."""
    let_next_start()
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    scale = tl.load(weight + column, mask=mask, other=0.0)
    wait_for_ahead()
    count, kept = _count(areas, rank)
    stamp_begin(stamp)
    own = _slot(areas, rank, count, x)
    for row in range(program, rows, programs):
        part = tl.load(x + row * width + column, mask=mask)
        tl.store(own + row // programs * BLOCK + column, part, mask=mask)
    _meet(areas, rank, 2 * count + 1, SIZE, WIDE)
    for row in range(program, rows, programs):
        at = residual + row * width + column
        h = _sum(areas, count, x, row // programs * BLOCK + column, mask, SIZE)
        h += tl.load(at, mask=mask, other=0.0)
        tl.store(at, h, mask=mask)
        norm_and_store(h, scale, out, out_fp8, out_scales, row, rows, width, eps, BLOCK, LARGEST)
    tl.store(kept, count + 1)
    stamp_end(stamp)


@triton.jit(do_not_specialize=["rank", "rows", "tiles"])
def _gather(
    x, out, edges, areas, rank, rows, tiles, width, begins, ends, SIZE: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Tiles of a row's columns, as many as the widest rank has; `edges` says which columns of the whole a rank has."""
    let_next_start()
    program, programs, lane = tl.program_id(0), tl.num_programs(0), tl.arange(0, TILE)
    wait_for_ahead()
    count, kept = _count(areas, rank)
    stamp_begin(begins)
    own = _slot(areas, rank, count, x)
    own_width = tl.multiple_of(tl.load(edges + rank + 1) - tl.load(edges + rank), ALIGNED)
    for tile in range(program, rows * tiles, programs):
        column = tile % tiles * TILE + lane
        part = tl.load(x + tile // tiles * own_width + column, mask=column < own_width)
        tl.store(own + tile // programs * TILE + lane, part, mask=column < own_width)
    _meet(areas, rank, 2 * count + 1, SIZE, WIDE)
    for peer in tl.static_range(SIZE):
        theirs = _slot(areas, peer, count, x)
        first = tl.multiple_of(tl.load(edges + peer), ALIGNED)
        last = tl.multiple_of(tl.load(edges + peer + 1), ALIGNED)
        for tile in range(program, rows * tiles, programs):
            column = first + tile % tiles * TILE + lane
            part = tl.load(theirs + tile // programs * TILE + lane, mask=column < last)
            tl.store(out + tile // tiles * width + column, part, mask=column < last)
    tl.store(kept, count + 1)
    stamp_end(ends)


def _meeting(peers: Peers) -> dict[str, int]:
    return {"SIZE": peers.size, "WIDE": triton.next_power_of_2(peers.size)}


def _tile(x: Tensor) -> int:
    return TILE_BYTES // x.element_size()


def one_shot(x: Tensor, peers: Peers) -> None:
    """x becomes the sum over ranks. It has at most as many tiles as there are programs."""
    tile = _tile(x)
    programs = triton.cdiv(x.numel(), tile)
    assert x.is_contiguous()
    assert programs <= PROGRAMS
    _one_shot[(programs,)](
        x, peers.table, peers.rank, x.numel(), taken(), TILE=tile, num_warps=8, launch_pdl=starts_early(),
        **_meeting(peers),
    )  # fmt: skip


def two_shot(x: Tensor, peers: Peers) -> None:
    """The same for any size, in pieces that fit the slots; each element is read twice instead of once by every rank."""
    assert x.is_contiguous()
    tile = _tile(x)
    pieces = x.view(-1).split(PROGRAMS * peers.size * (SLOT_TILES // peers.size) * tile)
    for piece, stamps in zip(pieces, taken_by(len(pieces)), strict=True):
        whole = triton.cdiv(piece.numel(), tile)
        programs = min(PROGRAMS, triton.cdiv(whole, peers.size))
        tiles = triton.cdiv(whole, programs * peers.size)
        _two_shot[(programs,)](
            piece, peers.table, peers.rank, piece.numel(), tiles, *stamps, TILE=tile, num_warps=8,
            launch_pdl=starts_early(), **_meeting(peers),
        )  # fmt: skip


def _norm_block(width: int) -> int:
    return max(GROUP, triton.next_power_of_2(width))


def fits_one_norm(x: Tensor) -> bool:
    """Whether the slots hold all rows of x at once."""
    rows, width = x.shape
    return triton.cdiv(rows, PROGRAMS) * _norm_block(width) * x.element_size() <= SLOT_BYTES


def one_shot_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: Form, peers: Peers
) -> Activations:
    """The norm of residual + the sum of x over ranks, which is kept in `residual`."""
    rows, width = x.shape
    assert x.is_contiguous()
    assert residual.is_contiguous()
    assert fits_one_norm(x)
    out, places = empty_in(form, x, *x.shape)
    _one_shot_add_rms_norm[(min(rows, PROGRAMS),)](
        x, residual, weight, *places, peers.table, peers.rank, rows, width, eps, taken(), BLOCK=_norm_block(width),
        LARGEST=LARGEST, num_warps=8 if width > 2048 else 4, launch_pdl=starts_early(), **_meeting(peers),
    )  # fmt: skip
    return out


def gather_columns(x: Tensor, widths: list[int], edges: Tensor, peers: Peers) -> Tensor:
    """Every rank's columns side by side. `edges` are the sums of `widths` from 0 on, on the device."""
    assert x.is_contiguous()
    tile, whole = _tile(x), sum(widths)
    tiles = triton.cdiv(max(widths), tile)
    out = x.new_empty(len(x), whole)
    at_once = PROGRAMS * SLOT_TILES // tiles
    aligned = 16 // x.element_size() if all(width * x.element_size() % 16 == 0 for width in widths) else 1
    parts = x.split(at_once)
    for part, piece, stamps in zip(parts, out.split(at_once), taken_by(len(parts)), strict=True):
        _gather[(min(len(part) * tiles, PROGRAMS),)](
            part, piece, edges, peers.table, peers.rank, len(part), tiles, whole, *stamps, TILE=tile,
            ALIGNED=aligned, num_warps=8, launch_pdl=starts_early(), **_meeting(peers),
        )  # fmt: skip
    return out
