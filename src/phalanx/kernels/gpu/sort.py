"""Pairs of token and expert by expert, in tiles of rows, without asking the host: counting sorts."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.gemm import counters

CHUNK = 64
"""Pairs that one program of the sort of many places."""

FEW_PAIRS = 4096
"""Up to these, one program that sorts them all is faster than several kernels that share the work."""

CLEARED = 1024
"""Numbers that a program clears at once."""

LANES, WARPS = 32, 8
"""Threads of a warp, and warps of a program that sorts: of fewer pairs than threads, threads would have to share."""


class ByExpert(NamedTuple):
    """`order` lists pair numbers by expert, padded with the number of pairs to whole tiles of rows.

    `owner` says whose a tile is, -1 being nobody's. Both have room for the worst case, so that nobody need be asked.
    """

    order: Tensor
    owner: Tensor


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _count(chosen, counts, pairs, experts, chunks, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """How many pairs of one chunk go to each expert."""
    let_next_start()
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, BLOCK)
    wait_for_ahead()
    mine = tl.load(chosen + at, mask=at < pairs, other=-1)
    found = tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + expert * chunks + chunk, found, mask=expert < experts)


@triton.jit(do_not_specialize=["pairs", "chunks", "tiles"])
def _place(
    chosen, counts, ends, order, owner, pairs, experts, chunks, tiles, TILE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write each pair of one chunk where its expert's rows lie; every expert's rows begin with a tile of their own.

    `ends` holds, after each chunk, how many pairs each expert has so far.
    """
    let_next_start()
    chunk = tl.program_id(0)
    expert, lane = tl.arange(0, BLOCK), tl.arange(0, CHUNK)
    at = chunk * CHUNK + lane
    wait_for_ahead()
    mine = tl.load(chosen + at, mask=at < pairs, other=-1)
    mask = expert < experts
    total = tl.load(ends + expert * chunks + chunks - 1, mask=mask, other=0)
    before = tl.load(ends + expert * chunks + chunk, mask=mask, other=0)
    before -= tl.load(counts + expert * chunks + chunk, mask=mask, other=0)
    tiles_needed = (total + TILE - 1) // TILE
    end = tl.cumsum(tiles_needed, 0)
    start = (end - tiles_needed) * TILE + before
    is_mine = mine[:, None] == expert[None, :]
    base = tl.sum(tl.where(is_mine, start[None, :], 0), 1)
    earlier = (mine[:, None] == mine[None, :]) & (lane[None, :] < lane[:, None])
    spot = base + tl.sum(earlier.to(tl.int32), 1)
    tl.store(order + spot, at, mask=at < pairs)
    for first in range(chunk * CHUNK, tiles, chunks * CHUNK):
        tile = first + lane
        finished = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
        tl.store(owner + tile, tl.where(tile < tl.max(end, 0), finished, -1), mask=tile < tiles)


@triton.jit(do_not_specialize=["pairs", "tiles"], do_not_specialize_on_alignment=["chosen", "order", "counter"])
def _sort_few(
    chosen, order, owner, counter, pairs, tiles, TILE: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
    CLEARED: tl.constexpr,
):  # fmt: skip
    """The whole sort in one program: first all tiles are padding and nobody's.

    `counter` has a zero for every expert and counts their pairs, the first of which gets the first row: that is left
    to chance, and no result depends on it.
    """
    let_next_start()
    pair, expert, lane = tl.arange(0, PAIRS), tl.arange(0, BLOCK), tl.arange(0, CLEARED)
    known = pair < pairs
    wait_for_ahead()
    mine = tl.load(chosen + pair, mask=known, other=0)
    for first in range(0, tiles * (TILE + 1), CLEARED):
        at = first + lane
        tl.store(order + at, tl.where(at < tiles * TILE, pairs, -1), mask=at < tiles * (TILE + 1))
    row = tl.atomic_add(counter + mine, 1, mask=known, sem="relaxed")
    tl.debug_barrier()
    tiles_needed = (tl.load(counter + expert, cache_modifier=".cg") + TILE - 1) // TILE
    start = tl.cumsum(tiles_needed, 0) - tiles_needed
    for tile in range(0, tl.max(tiles_needed, 0)):
        tl.store(owner + start + tile, expert, mask=tile < tiles_needed)
    tl.store(order + tl.gather(start, mine, 0) * TILE + row, pair, mask=known)
    tl.debug_barrier()
    tl.store(counter + expert, 0)


@cache
def _one_row_a_tile(pairs: int, tile: int, device: torch.device) -> Tensor:
    order = torch.full((pairs, tile), pairs, dtype=torch.int32, device=device)
    order[:, 0] = torch.arange(pairs, dtype=torch.int32)
    return order.flatten()


def apart(chosen: Tensor, tile: int) -> ByExpert:
    """Every pair in a tile of its own, as if no two had the same expert."""
    return ByExpert(_one_row_a_tile(chosen.numel(), tile, chosen.device), chosen.flatten())


def sort_by_expert(chosen: Tensor, experts: int, tile: int) -> ByExpert:
    """The experts of a single token are all different: each gets a tile."""
    if len(chosen) == 1:
        return apart(chosen, tile)
    pairs, block = chosen.numel(), triton.next_power_of_2(experts)
    tiles = min(pairs, triton.cdiv(pairs, tile) + experts)
    order, owner = torch.empty(tiles * (tile + 1), dtype=torch.int32, device=chosen.device).split([tiles * tile, tiles])
    if pairs <= FEW_PAIRS:  # which clears both in one go
        _sort_few[(1,)](
            chosen, order, owner, counters(chosen.device), pairs, tiles, TILE=tile, BLOCK=block,
            PAIRS=max(LANES * WARPS, triton.next_power_of_2(pairs)), CLEARED=CLEARED, num_warps=WARPS,
            launch_pdl=starts_early(),
        )  # fmt: skip
        return ByExpert(order, owner)
    chunks = triton.cdiv(pairs, CHUNK)
    counts = torch.empty(experts, chunks, dtype=torch.int32, device=chosen.device)
    _count[(chunks,)](chosen, counts, pairs, experts, chunks, BLOCK=block, CHUNK=CHUNK, launch_pdl=starts_early())
    _place[(chunks,)](
        chosen, counts, counts.cumsum(1, dtype=torch.int32), order.fill_(pairs), owner, pairs, experts, chunks,
        tiles, TILE=tile, BLOCK=block, CHUNK=CHUNK, launch_pdl=starts_early(),
    )  # fmt: skip
    return ByExpert(order, owner)
