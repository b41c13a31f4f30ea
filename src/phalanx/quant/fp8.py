"""FP8: e4m3 values with a scale for each tile, for each row or for all."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.four_bit import reordered
from phalanx.kernels.fp8 import GROUP, Fp8Weight, quantise_blocks, quantise_channels, row_block_of
from phalanx.kernels.gemm import Fp8Gemm, Held, Product
from phalanx.quant.base import GpuScheme, Pieces, Slices

_KEPT_TILES = ((GROUP, GROUP), (1, None))


class Fp8(GpuScheme):
    @property
    def in_panels(self) -> bool:  # type: ignore[override]
        return self.keeps

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        return self.scheme.format.tile in _KEPT_TILES

    @property
    def _tall(self) -> int:
        return self.scheme.format.tile[0] if self.scheme.format.tile else 1

    def _scales(self, pieces: Pieces) -> Tensor:
        """By rows and columns, in float32."""
        scales = pieces["scales"].float()
        return scales if scales.dim() == 2 else scales.reshape(1, 1)

    def widen(self, pieces: Pieces, slices: Slices) -> Tensor:
        grid, tile = self._scales(pieces), self.scheme.format.tile or (1, None)
        for axis, (part, size) in enumerate(zip(slices, tile, strict=True)):
            if size is not None and grid.shape[axis] > 1:
                grid = grid.index_select(axis, torch.arange(part.start, part.stop) // size - part.start // size)
        return pieces["values"].float() * grid

    def empty(self, stack: tuple[int, ...], rows: list[int], columns: int, device: torch.device) -> Fp8Weight:
        return Fp8Weight.empty(*stack, sum(rows), columns, row_block=row_block_of(rows, self._tall), device=device)

    def fill(self, target: Held, pieces: Pieces, slices: Slices, order: Tensor | None) -> None:
        assert isinstance(target, Fp8Weight)
        values, scales = pieces["values"], self._scales(pieces)
        if self._tall == 1:
            scales = scales.expand(len(values), scales.shape[1])
        if order is not None:
            values = reordered(values, order)
            scales = scales[order] if self._tall == 1 else scales
        target.fill(values, scales, self._tall)

    def round(self, target: Held, values: Tensor) -> None:
        assert isinstance(target, Fp8Weight)
        quantised = quantise_blocks(values) if self._tall > 1 else quantise_channels(values)
        target.fill(*quantised, self._tall)

    def product(self, weight: Held, bias: Tensor | None, dtype: torch.dtype) -> Product:
        assert isinstance(weight, Fp8Weight)
        return Fp8Gemm(weight, bias, dtype)
