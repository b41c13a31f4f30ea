"""FP8: e4m3 weights with one scale a tile, and activations with one scale for each 128 columns of a row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.panels import Panels

E4M3 = torch.float8_e4m3fn
GROUP = 128
LARGEST = 448.0
ROWS_AT_ONCE = 32 * GROUP
"""Of a matrix that is brought to FP8: what that takes beside it stays small."""


@cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether kernels on this device turn e4m3 into other numbers: GPUs from compute capability 8.9 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


class Quantised(NamedTuple):
    """Activations: e4m3 values [rows, width], and float32 scales [rows, groups] that lie column by column."""

    values: Tensor
    scales: Tensor


class InBoth(NamedTuple):
    """The same activations as they are computed and in FP8, for a part that multiplies both."""

    plain: Tensor
    in_fp8: Quantised


Activations = Tensor | Quantised | InBoth


class Form(Enum):
    """Which of these a part takes."""

    PLAIN = auto()
    FP8 = auto()
    BOTH = auto()


def plain(x: Activations) -> Tensor:
    """As they are computed, for who does not take them in FP8 alone."""
    found = x.plain if isinstance(x, InBoth) else x
    assert isinstance(found, Tensor)
    return found


def rows_in(x: Activations) -> int:
    return len(x.values if isinstance(x, Quantised) else plain(x))


def dequantise(values: Tensor, scales: Tensor, row_block: int, dtype: torch.dtype) -> Tensor:
    """Every element times the scale of the tile of `row_block` x 128 that it lies in, for one matrix or a stack."""
    rows, columns = values.shape[-2:]
    by_row = scales.repeat_interleave(row_block, -2)[..., :rows, :]
    return (values.float() * by_row.repeat_interleave(GROUP, -1)[..., :columns]).to(dtype)


def row_block_of(parts: list[int], tile_rows: int = GROUP) -> int:
    """Rows that share a scale when matrices of these heights are stacked: a tile's where all but the last end on it."""
    return gcd(tile_rows, *parts[:-1])


@dataclass(frozen=True)
class Fp8Weight:
    """A matrix [outputs, inputs], or a stack of them, in e4m3 with a scale for each tile of `row_block` x 128."""

    values: Tensor
    scales: Tensor
    row_block: int

    @classmethod
    def empty(cls, *shape: int, row_block: int, device: torch.device) -> Fp8Weight:
        *stack, rows, columns = shape
        grid = (*stack, -(-rows // row_block), -(-columns // GROUP))
        values = torch.empty(shape, dtype=E4M3, device=device)
        return cls(values, torch.empty(grid, dtype=torch.float32, device=device), row_block)

    @classmethod
    def of(cls, matrix: Tensor) -> Fp8Weight:
        """One that is in plain numbers."""
        rows, columns = matrix.shape
        found = cls.empty(rows, columns, row_block=GROUP, device=matrix.device)
        for first in range(0, rows, ROWS_AT_ONCE):
            values, scales = quantise_blocks(matrix[first : first + ROWS_AT_ONCE])
            found.values[first : first + len(values)] = values
            found.scales[first // GROUP : first // GROUP + len(scales)] = scales
        return found

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def numel(self) -> int:
        return self.values.numel()

    def __getitem__(self, index: int) -> Fp8Weight:
        return Fp8Weight(self.values[index], self.scales[index], self.row_block)

    def split(self, rows: list[int]) -> list[Fp8Weight]:
        """The matrices that were stacked, as views."""
        starts = [sum(rows[:index]) // self.row_block for index in range(len(rows))]
        heights = [-(-count // self.row_block) for count in rows]
        scales = [self.scales[start : start + height] for start, height in zip(starts, heights, strict=True)]
        parts = zip(self.values.split(rows), scales, strict=True)
        return [Fp8Weight(values, grid, self.row_block) for values, grid in parts]

    def fill(self, values: Tensor, scales: Tensor, tile_rows: int = GROUP) -> None:
        """Take over values and scales as a checkpoint holds them: one for `tile_rows` x 128, or x a whole row."""
        self.values.copy_(values)
        repeated = scales.to(self.scales.device).repeat_interleave(tile_rows // self.row_block, 0)
        self.scales.copy_(repeated[: len(self.scales)])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return dequantise(self.values, self.scales, self.row_block, dtype)

    def panels(self) -> Panels:
        return Panels.of_e4m3(self.values, self.scales.repeat_interleave(self.row_block, 0)[: len(self.values)], GROUP)


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as e4m3 values and one scale for each 128 x 128 tile, which brings its largest value to 448."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % GROUP, 0, -rows % GROUP))
    tiles = padded.view(-(-rows // GROUP), GROUP, -(-columns // GROUP), GROUP)
    scales = tiles.abs().amax(dim=(1, 3)).clamp_min(1e-12) / LARGEST
    values = (tiles / scales[:, None, :, None]).to(E4M3).view(padded.shape)[:rows, :columns]
    return values, scales


def quantise_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as e4m3 values and one scale for each row, which brings its largest value to 448."""
    scales = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (weight.float() / scales).to(E4M3), scales
