"""GGUF's blocks of 32 numbers, each with a scale and, in some kinds, a minimum. Widening is the `gguf` package's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from phalanx.kernels.gemm import Held
from phalanx.kernels.panels import BLOCK, Panels
from phalanx.quant.base import Pieces, SchemeAtWork, Slices
from phalanx.spec.schemes import GGUF_BLOCK_BYTES


@dataclass(frozen=True)
class GgufWeight:
    """A matrix, or a stack of them, as the file has it: `values` are [..., rows, blocks, bytes of a block]."""

    kind: str
    columns: int
    values: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:-2], self.columns))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def numel(self) -> int:
        return self.shape.numel()

    def __getitem__(self, index: int) -> GgufWeight:
        return GgufWeight(self.kind, self.columns, self.values[index])

    def split(self, rows: list[int]) -> list[GgufWeight]:
        return [GgufWeight(self.kind, self.columns, part) for part in self.values.split(rows)]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        wide = dequantize(self.values.flatten(-2).numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(wide)[..., : self.columns].to(dtype)

    def panels(self) -> Panels:
        """[scale, (minimum,) (fifth bits,) codes] of each block, taken apart."""
        bits, has_minimum = int(self.kind[1]), self.kind.endswith("_1")
        numbers = 2 if has_minimum else 1
        factors = self.values[..., : 2 * numbers].contiguous().view(torch.float16)
        codes = self.values[..., 2 * numbers :]
        if bits < 8:
            halves = codes[..., -BLOCK // 2 :]
            codes = torch.cat((halves & 15, halves >> 4), -1) | _fifth_bits(codes[..., : -BLOCK // 2])
        minimums = factors[..., 1] if has_minimum else None
        shift = 0 if has_minimum or bits == 8 else 2 ** (bits - 1)
        return Panels.of(codes.flatten(1)[:, : self.columns], factors[..., 0], BLOCK, bits, shift, minimums)


def _fifth_bits(packed: Tensor) -> Tensor | int:
    """Of 32 columns in 4 bytes, each in its place of a byte of its own; 0 where there are none."""
    if not packed.shape[-1]:
        return 0
    bits = (packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


class Gguf(SchemeAtWork):
    """Read, not made; a GPU gets these weights widened."""

    in_panels = in_one_order = True

    def widen(self, pieces: Pieces, slices: Slices) -> Tensor:
        values, columns = pieces["values"], slices[1]
        wide = GgufWeight(self._kind, values.shape[1] * BLOCK, values).dequantised(torch.float32)
        return wide.narrow(1, columns.start % BLOCK, columns.stop - columns.start)

    @property
    def _kind(self) -> str:
        return self.scheme.format.name.upper()

    def empty(self, stack: tuple[int, ...], rows: list[int], columns: int, device: torch.device) -> GgufWeight:
        shape = (*stack, sum(rows), -(-columns // BLOCK), GGUF_BLOCK_BYTES[self.scheme.format.name])
        return GgufWeight(self._kind, columns, torch.empty(shape, dtype=torch.uint8, device=device))

    def fill(self, target: Held, pieces: Pieces, slices: Slices, order: Tensor | None) -> None:
        assert isinstance(target, GgufWeight)
        target.values.copy_(pieces["values"] if order is None else pieces["values"][order])
