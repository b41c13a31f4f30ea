"""Routed experts without asking the host: each expert's rows are multiplied as tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.four_bit import FourBitWeight
from phalanx.kernels.fp8 import Activations, Fp8Weight, InBoth, Quantised, converts_e4m3, plain
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.four_bit import grouped_product, grouped_tiles
from phalanx.kernels.gpu.gemm import HAS_GLUON, Tile, pick_tile, streamed_tile, tile_product
from phalanx.kernels.gpu.rows import gate_and_mul, quantise
from phalanx.kernels.gpu.shared_memory import stages_here
from phalanx.kernels.gpu.sort import apart, sort_by_expert
from phalanx.kernels.pairs import Unsummed
from phalanx.spec.ffn import Activation

if HAS_GLUON:
    from phalanx.kernels.gpu import expert_prompts, expert_stream

BF16_TILES = {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 128, 64, 8, 3), 128: Tile(128, 128, 64, 8, 3)}
FP8_TILES = {16: Tile(16, 64, 256, 4, 3), 32: Tile(32, 128, 128, 4, 3), 128: Tile(128, 64, 128, 4, 4)}
WIDENED_TILES = {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 64, 128, 4, 3)}
"""For FP8 weights on cards that do not convert them."""

STREAMED_BF16_TILES = {rows: streamed_tile(rows) for rows in (8, 16, 32)} | {64: BF16_TILES[64], 128: BF16_TILES[128]}
STREAMED_FP8_TILES = {rows: streamed_tile(rows) for rows in (8, 16, 32)}
STREAMED_FP8_TILES |= {96: streamed_tile(32), 128: streamed_tile(64), 256: FP8_TILES[128]}
"""On Hoppers. Of many rows, a second tile of some costs less than a larger one of all."""

PROMPT_TILE = Tile(128, 256, 128, 12, 4)
PROMPT_FP8_TILES = {rows: streamed_tile(rows) for rows in (8, 16, 32)} | {80: streamed_tile(32), 256: PROMPT_TILE}
PROMPT_BF16_TILES = STREAMED_BF16_TILES | {128: PROMPT_TILE}
"""Of both products by `expert_prompts`, on Hoppers too."""

EXPERTS_A_PAIR = 6
"""Where there are as many in FP8, few pairs share one: to read it again, from the cache, is quicker than to sort."""


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
    way = _way(gate_up, down, given.dtype)
    tile = way.tile(rows * top, experts)
    few = way.quantised and EXPERTS_A_PAIR * rows * top <= experts
    by_expert = apart(chosen, tile.rows) if few else sort_by_expert(chosen, experts, tile.rows)
    pairs = ExpertPairs(*by_expert, rows * top, tile, given.dtype)
    taken: Tensor | Quantised
    if weighs_input:
        taken, pairs_a_row = (given[:, None] * weights[..., None].to(given.dtype)).flatten(0, 1), 1
    else:
        taken, pairs_a_row = x.in_fp8 if way.quantised and isinstance(x, InBoth) else given, top
    pair_weights = None if weighs_input else weights
    if tile == PROMPT_TILE:
        if way.quantised and isinstance(taken, Tensor):
            taken = quantise(taken)
        out = given.new_empty(rows * top, given.shape[1])
        expert_prompts.product(taken, gate_up[0], down[0], *by_expert, pairs_a_row, pair_weights, out, activation)
        return Unsummed(out, top)
    entered = way.product(taken, *gate_up, pairs, pairs_a_row, None)
    inner = gate_and_mul(entered, activation, way.quantised)
    return Unsummed(way.product(inner, *down, pairs._replace(placed=True), 1, pair_weights), top)


class ExpertPairs(NamedTuple):
    """Pairs of token and expert, sorted by expert into tiles; `placed` if that was so before the kernel ahead began."""

    order: Tensor
    owner: Tensor
    number: int
    tile: Tile
    dtype: torch.dtype
    placed: bool = False


class _Way(NamedTuple):
    """How experts of one format are multiplied; `quantised`: what lies between the products is brought to FP8."""

    tiles: dict[int, Tile]
    product: Callable[..., Tensor]
    quantised: bool = False

    def tile(self, pairs: int, experts: int) -> Tile:
        """Tiles that hold twice an expert's average share, so that few experts need a second one."""
        return pick_tile(self.tiles, triton.cdiv(2 * pairs, experts))


def _way(entering: Experts, leaving: Experts, dtype: torch.dtype) -> _Way:
    (gate_up, bias), (down, other_bias) = entering, leaving
    if isinstance(gate_up, FourBitWeight):
        return _Way(grouped_tiles(dtype, gate_up, down), _four_bit_grouped)
    quantised = isinstance(gate_up, Fp8Weight)
    if quantised and not converts_e4m3(gate_up.values.device):
        return _Way(WIDENED_TILES, _grouped)
    if HAS_GLUON and expert_stream.streams(dtype, gate_up, down):
        if bias is None and other_bias is None and all(map(expert_prompts.multiplies, (gate_up, down))):
            return _Way(PROMPT_FP8_TILES if quantised else PROMPT_BF16_TILES, _grouped, quantised)
        return _Way(STREAMED_FP8_TILES if quantised else STREAMED_BF16_TILES, _grouped, quantised)
    return _Way(FP8_TILES if quantised else BF16_TILES, _grouped, quantised)


def _four_bit_grouped(
    x: Tensor,
    weight: FourBitWeight,
    bias: Tensor | None,
    pairs: ExpertPairs,
    pairs_a_row: int,
    pair_weights: Tensor | None,
) -> Tensor:
    order, owner, count, tile, _, placed = pairs
    return grouped_product(x.contiguous(), weight, bias, order, owner, pairs_a_row, pair_weights, count, tile, placed)


def _streamed(
    x: Tensor | Quantised, weight: Tensor | Fp8Weight, bias: Tensor | None, pairs: ExpertPairs, pairs_a_row: int,
    pair_weights: Tensor | None,
) -> Tensor:  # fmt: skip
    order, owner, count, tile, dtype, placed = pairs
    if isinstance(x, Tensor):
        x = quantise(x) if isinstance(weight, Fp8Weight) else x.contiguous()
    out = torch.empty(count, weight.shape[1], dtype=dtype, device=order.device)
    expert_stream.product(x, weight, bias, order, owner, pairs_a_row, pair_weights, out, tile.rows, placed)
    return out


def _grouped(
    x: Tensor | Quantised, weight: Tensor | Fp8Weight, bias: Tensor | None, pairs: ExpertPairs, pairs_a_row: int,
    pair_weights: Tensor | None,
) -> Tensor:  # fmt: skip
    order, owner, count, tile, dtype, _ = pairs
    if tile.streamed:
        return _streamed(x, weight, bias, pairs, pairs_a_row, pair_weights)
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
    out = torch.empty(count, outputs, dtype=dtype, device=values.device)
    _grouped_product[(triton.cdiv(outputs, tile.outputs), len(owner))](
        values, x_scales, matrices, scales, bias, order, owner, pair_weights, out, count, values.shape[0], pairs_a_row,
        outputs, inputs, 0 if scales is None else scales.shape[1], FP8=scales is not None, ROW_BLOCK=row_block,
        HAS_BIAS=bias is not None, WEIGHED=pair_weights is not None, ROWS=tile.rows, OUTPUTS=tile.outputs,
        INPUTS=tile.inputs, num_warps=tile.warps, num_stages=stages_here(tile.stages), launch_pdl=starts_early(),
    )  # fmt: skip
    return out
