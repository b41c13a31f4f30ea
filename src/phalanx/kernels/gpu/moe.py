"""Routed experts without asking the host: sort by expert, and multiply each expert's rows as tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.four_bit import FourBitWeight
from phalanx.kernels.fp8 import Activations, Fp8Weight, InBoth, Quantised, converts_e4m3, plain
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.four_bit import grouped_product, grouped_tiles
from phalanx.kernels.gpu.gemm import Tile, pick_tile, tile_product
from phalanx.kernels.gpu.rows import gate_and_mul, quantise
from phalanx.kernels.gpu.shared_memory import stages_here
from phalanx.kernels.pairs import Unsummed
from phalanx.spec.ffn import Activation

CHUNK = 64
"""Pairs of token and expert that one program of the counting sort places."""

FEW_PAIRS = 4096
"""Up to these, one program that sorts them all is faster than several kernels that share the work."""

BF16_TILES = {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 128, 64, 8, 3), 128: Tile(128, 128, 64, 8, 3)}
FP8_TILES = {16: Tile(16, 64, 128, 4, 3), 32: Tile(32, 128, 128, 4, 3), 128: Tile(128, 64, 128, 4, 4)}
WIDENED_TILES = {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 64, 128, 4, 3)}
"""For FP8 weights on cards that do not convert them."""

FEW_EXPERTS = {32: Tile(16, 64, 128, 4, 6), 128: Tile(16, 64, 128, 4, 4)}
"""For so few pairs as leave some of a GPU idle: more of a weight is on its way at once."""

SHORT_INPUTS, SHORT_TILE = 1024, Tile(16, 128, 128, 8, 3)
"""Up to these inputs a program ends before much is on its way: fewer and wider ones are faster."""


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


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _sort_few(
    chosen, starts, order, owner, pairs, experts, tiles, TILE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr
):
    """The whole sort in one program. Which row of its expert a pair gets is left to chance: no result depends on it."""
    let_next_start()
    expert, lane = tl.arange(0, BLOCK), tl.arange(0, LANES)
    wait_for_ahead()
    counts = tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, LANES):
        known = first + lane < pairs
        counts += tl.histogram(tl.load(chosen + first + lane, mask=known, other=0), BLOCK, mask=known)
    tiles_needed = (counts + TILE - 1) // TILE
    end = tl.cumsum(tiles_needed, 0)
    tl.store(starts + expert, (end - tiles_needed) * TILE, mask=expert < experts)
    for first in range(0, tiles * TILE, LANES):
        tl.store(order + first + lane, pairs, mask=first + lane < tiles * TILE)
    used = tl.max(end, 0)
    for first in range(0, tiles, LANES):
        tile = first + lane
        tl.store(owner + tile, -1, mask=(tile >= used) & (tile < tiles))
    for tile in range(0, tl.max(tiles_needed, 0)):
        tl.store(owner + end - tiles_needed + tile, expert, mask=tile < tiles_needed)
    tl.debug_barrier()
    for first in range(0, pairs, LANES):
        pair = first + lane
        mine = tl.load(chosen + pair, mask=pair < pairs, other=0)
        spot = tl.atomic_add(starts + mine, 1, mask=pair < pairs, sem="relaxed")
        tl.store(order + spot, pair, mask=pair < pairs)


@cache
def _one_row_a_tile(pairs: int, tile: int, device: torch.device) -> Tensor:
    order = torch.full((pairs, tile), pairs, dtype=torch.int32, device=device)
    order[:, 0] = torch.arange(pairs, dtype=torch.int32)
    return order.flatten()


def sort_by_expert(chosen: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """A counting sort: `order` lists pair numbers by expert, padded with the number of pairs to whole tiles of rows.

    `owner` says whose a tile is, -1 being nobody's. Both have room for the worst case, so that nobody need be asked.
    The experts of a single token are all different: each gets a tile.
    """
    if len(chosen) == 1:
        return _one_row_a_tile(chosen.numel(), tile, chosen.device), chosen[0]
    pairs, block = chosen.numel(), triton.next_power_of_2(experts)
    tiles = min(pairs, triton.cdiv(pairs, tile) + experts)
    order = torch.empty(tiles * tile, dtype=torch.int32, device=chosen.device)
    owner = torch.empty(tiles, dtype=torch.int32, device=chosen.device)
    if pairs <= FEW_PAIRS:
        starts = torch.empty(experts, dtype=torch.int32, device=chosen.device)
        _sort_few[(1,)](
            chosen, starts, order, owner, pairs, experts, tiles, TILE=tile, BLOCK=block,
            LANES=min(1024, max(128, triton.next_power_of_2(pairs))), num_warps=8, launch_pdl=starts_early(),
        )  # fmt: skip
        return order, owner
    chunks = triton.cdiv(pairs, CHUNK)
    counts = torch.empty(experts, chunks, dtype=torch.int32, device=chosen.device)
    _count[(chunks,)](chosen, counts, pairs, experts, chunks, BLOCK=block, CHUNK=CHUNK, launch_pdl=starts_early())
    _place[(chunks,)](
        chosen, counts, counts.cumsum(1, dtype=torch.int32), order.fill_(pairs), owner, pairs, experts, chunks, tiles,
        TILE=tile, BLOCK=block, CHUNK=CHUNK, launch_pdl=starts_early(),
    )  # fmt: skip
    return order, owner


@triton.jit(do_not_specialize=["pairs", "x_rows"])
def _grouped_product(
    x, x_scales, weight, scales, bias, order, owner, pair_weights, out, pairs, x_rows, pairs_a_row, outputs, inputs,
    scale_rows, FP8: tl.constexpr, ROW_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """One tile of one expert: out[pair] = x[pair // pairs_a_row] @ weight[expert].T + bias, or times its weight."""
    let_next_start()
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tile = tl.program_id(1)
    wait_for_ahead()
    expert = tl.load(owner + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order + tile * ROWS + tl.arange(0, ROWS))
        known = pair < pairs
        acc = tile_product(
            x, x_scales, pair // pairs_a_row, known, x_rows, weight + expert * outputs * inputs,
            scales, expert * scale_rows * tl.cdiv(inputs, 128), output, outputs, inputs, 0, inputs,
            FP8, ROW_BLOCK, ROWS, OUTPUTS, INPUTS,
        )  # fmt: skip
        if HAS_BIAS:
            bias_row = bias + expert * outputs + output
            acc += tl.load(bias_row, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        if WEIGHED:
            acc *= tl.load(pair_weights + pair, mask=known, other=0.0)[None, :]
        place = pair[None, :].to(tl.int64) * outputs + output[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=(output[:, None] < outputs) & known[None, :])


Experts = tuple[Any, Tensor | None]
"""The matrices of all experts, plain or in one of the formats below, and their biases."""


def expert_pairs(
    x: Activations, gate_up: Experts, down: Experts, weights: Tensor, chosen: Tensor, activation: Activation,
    weighs_input: bool,
) -> Unsummed:  # fmt: skip
    """Where weights multiply what experts take, every pair has a row of its own there too."""
    given = plain(x)
    rows, top, experts = len(given), chosen.shape[1], gate_up[0].shape[0]
    way = _way(gate_up[0], down[0], given.dtype)
    tile = way.tile(rows * top, experts)
    pairs = ExpertPairs(*sort_by_expert(chosen, experts, tile.rows), rows * top, tile, given.dtype)
    taken: Tensor | Quantised
    if weighs_input:
        taken, pairs_a_row = (given[:, None] * weights[..., None].to(given.dtype)).flatten(0, 1), 1
    else:
        taken, pairs_a_row = x.in_fp8 if way.quantised and isinstance(x, InBoth) else given, top
    pair_weights = None if weighs_input else weights
    entered = way.product(taken, *gate_up, pairs, pairs_a_row, None)
    return Unsummed(way.product(gate_and_mul(entered, activation, way.quantised), *down, pairs, 1, pair_weights), top)


class ExpertPairs(NamedTuple):
    """Pairs of token and expert, sorted by expert into tiles."""

    order: Tensor
    owner: Tensor
    number: int
    tile: Tile
    dtype: torch.dtype


class _Way(NamedTuple):
    """How experts of one format are multiplied; `quantised`: what lies between the products is brought to FP8."""

    tiles: dict[int, Tile]
    product: Callable[..., Tensor]
    quantised: bool = False
    few: Mapping[int, Tile] = MappingProxyType({})

    def tile(self, pairs: int, experts: int) -> Tile:
        """Tiles that hold twice an expert's average share, so that few experts need a second one."""
        usual = pick_tile(self.tiles, triton.cdiv(2 * pairs, experts))
        few = (tile for most, tile in self.few.items() if pairs <= most and tile.rows == usual.rows)
        return next(few, usual)


def _way(gate_up: Tensor | Fp8Weight | FourBitWeight, down: Any, dtype: torch.dtype) -> _Way:
    if isinstance(gate_up, Fp8Weight):
        if converts_e4m3(gate_up.values.device):
            return _Way(FP8_TILES, _grouped, True, FEW_EXPERTS)
        return _Way(WIDENED_TILES, _grouped)
    if isinstance(gate_up, FourBitWeight):
        return _Way(grouped_tiles(dtype, gate_up, down), _four_bit_grouped)
    return _Way(BF16_TILES, _grouped)


def _four_bit_grouped(
    x: Tensor,
    weight: FourBitWeight,
    bias: Tensor | None,
    pairs: ExpertPairs,
    pairs_a_row: int,
    pair_weights: Tensor | None,
) -> Tensor:
    order, owner, count, tile, _ = pairs
    return grouped_product(x.contiguous(), weight, bias, order, owner, pairs_a_row, pair_weights, count, tile)


def _grouped(
    x: Tensor | Quantised, weight: Tensor | Fp8Weight, bias: Tensor | None, pairs: ExpertPairs, pairs_a_row: int,
    pair_weights: Tensor | None,
) -> Tensor:  # fmt: skip
    order, owner, count, tile, dtype = pairs
    if isinstance(weight, Fp8Weight):
        matrices, scales, row_block = weight.values, weight.scales, weight.row_block
        if converts_e4m3(matrices.device):
            values, x_scales = quantise(x) if isinstance(x, Tensor) else x
        else:
            assert isinstance(x, Tensor)
            values, x_scales, matrices = x.contiguous(), None, matrices.view(torch.uint8)
    else:
        assert isinstance(x, Tensor)
        values, x_scales, matrices, scales, row_block = x.contiguous(), None, weight, None, 1
    _, outputs, inputs = matrices.shape
    if x_scales is not None and tile.rows == SHORT_TILE.rows and inputs <= SHORT_INPUTS:
        tile = SHORT_TILE
    out = torch.empty(count, outputs, dtype=dtype, device=values.device)
    _grouped_product[(triton.cdiv(outputs, tile.outputs), len(owner))](
        values, x_scales, matrices, scales, bias, order, owner, pair_weights, out, count, values.shape[0], pairs_a_row,
        outputs, inputs, 0 if scales is None else scales.shape[1], FP8=scales is not None, ROW_BLOCK=row_block,
        HAS_BIAS=bias is not None, WEIGHED=pair_weights is not None, ROWS=tile.rows, OUTPUTS=tile.outputs,
        INPUTS=tile.inputs, num_warps=tile.warps, num_stages=stages_here(tile.stages), launch_pdl=starts_early(),
    )  # fmt: skip
    return out
