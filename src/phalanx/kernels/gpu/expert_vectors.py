"""The experts of a single token: each multiplies a row of its own, as a matrix by a vector."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead


class VectorTile(NamedTuple):
    """Outputs of one program, how much of the inputs it takes at once, and its warps."""

    outputs: int
    inputs: int
    warps: int


PLAIN_TILE = VectorTile(8, 256, 4)
FP8_TILES = {512: VectorTile(16, 128, 4), 1024: VectorTile(32, 256, 4), 4096: VectorTile(32, 256, 8)}
LONG_FP8_TILE = VectorTile(8, 512, 4)
"""By the inputs of a matrix, and of longer ones."""


@triton.jit(do_not_specialize=["x_rows"])
def _expert_vectors(
    x, x_scales, weight, scales, bias, owner, pair_weights, out, x_rows, pairs_a_row, outputs, inputs, scale_rows,
    FP8: tl.constexpr, ROW_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHED: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Some outputs of one pair. With FP8, the numbers of x are multiplied by the scales of both."""
    let_next_start()
    first, pair = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    output, column = first + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    wanted = output < outputs
    row = (pair // pairs_a_row).to(tl.int64)
    wait_for_ahead()
    expert = tl.load(owner + pair).to(tl.int64)
    place = weight + (expert * outputs + output[:, None]) * inputs + column
    scale = scales + (expert * scale_rows + first // ROW_BLOCK) * tl.cdiv(inputs, 128) if FP8 else scales
    acc = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        inside = start + column < inputs
        block = tl.load(place + start, mask=wanted[:, None] & inside, other=0.0)
        given = tl.load(x + row * inputs + start + column, mask=inside, other=0.0).to(tl.float32)
        if FP8:
            group = (start + column) // 128
            given *= tl.load(x_scales + group * x_rows + row, mask=inside, other=0.0)
            given *= tl.load(scale + group, mask=inside, other=0.0)
        acc += block.to(tl.float32) * given
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias + expert * outputs + output, mask=wanted, other=0.0).to(tl.float32)
    if WEIGHED:
        y *= tl.load(pair_weights + pair)
    tl.store(out + pair.to(tl.int64) * outputs + output, y.to(out.dtype.element_ty), mask=wanted)


def tile_for(inputs: int, row_block: int, in_fp8: bool) -> VectorTile | None:
    """None where the outputs of a program would not share their scales."""
    if not in_fp8:
        return PLAIN_TILE
    tile = next((tile for most, tile in FP8_TILES.items() if inputs <= most), LONG_FP8_TILE)
    return tile if row_block % tile.outputs == 0 else None


def product(
    x: Tensor, x_scales: Tensor | None, weight: Tensor, scales: Tensor | None, row_block: int, bias: Tensor | None,
    owner: Tensor, pairs_a_row: int, pair_weights: Tensor | None, out: Tensor, tile: VectorTile,
) -> Tensor:  # fmt: skip
    """out[pair] = x[pair // pairs_a_row] @ weight[owner[pair]].T + bias, or times its weight."""
    _, outputs, inputs = weight.shape
    _expert_vectors[(triton.cdiv(outputs, tile.outputs), len(out))](
        x, x_scales, weight, scales, bias, owner, pair_weights, out, x.shape[0], pairs_a_row, outputs, inputs,
        0 if scales is None else scales.shape[1], FP8=scales is not None, ROW_BLOCK=row_block,
        HAS_BIAS=bias is not None, WEIGHED=pair_weights is not None, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        num_warps=tile.warps, launch_pdl=starts_early(),
    )  # fmt: skip
    return out
