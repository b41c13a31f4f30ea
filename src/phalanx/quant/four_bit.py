"""What formats of four bits have in common: all are held in one way and multiplied by one kernel."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.kernels.four_bit import FourBitWeight, Groups, Numbers, widen
from phalanx.kernels.gemm import FourBitGemm, Held, Product
from phalanx.quant.base import GpuScheme, Pieces, Slices
from phalanx.spec.schemes import WORD


class FourBit(GpuScheme):
    numbers: Numbers

    @property
    @abstractmethod
    def scale_dtype(self) -> torch.dtype: ...

    @abstractmethod
    def codes(self, pieces: Pieces, slices: Slices) -> Tensor:
        """Of each number of the part."""

    def zeros(self, pieces: Pieces, rows: slice) -> Tensor | None:
        return None

    def groups(self, pieces: Pieces, slices: Slices) -> Groups:
        """The part by its codes, scales and zero points."""
        codes, columns = self.codes(pieces, slices), slices[1]
        width = self.scheme.group or columns.stop
        factor = pieces.get("factor")
        return Groups(
            codes,
            pieces["scales"].view(self.scale_dtype)
            if self.scale_dtype.itemsize == 1
            else pieces["scales"].contiguous(),
            width,
            self.zeros(pieces, slices[0]),
            None if factor is None else factor.float().reshape(1),
            self.scheme.divides,
            columns.start % width,
        )

    @abstractmethod
    def rounded(self, values: Tensor) -> Groups: ...

    def widen(self, pieces: Pieces, slices: Slices) -> Tensor:
        return widen(self.groups(pieces, slices), self.numbers)

    def empty(self, stack: tuple[int, ...], rows: list[int], columns: int, device: torch.device) -> FourBitWeight:
        return FourBitWeight.empty(
            *stack,
            sum(rows),
            columns,
            numbers=self.numbers,
            group=self.scheme.group,
            scale_dtype=self.scale_dtype,
            zeros=self.scheme.piece("zeros") is not None,
            factors=self.scheme.piece("factor") is not None,
            device=device,
        )

    def fill(self, target: Held, pieces: Pieces, slices: Slices, order: Tensor | None) -> None:
        assert isinstance(target, FourBitWeight)
        there: Pieces = {role: piece.to(target.values.device) for role, piece in pieces.items()}
        groups = self.groups(there, slices)
        groups = groups if self.scheme.group else groups._replace(width=target.group, cut=0)
        _check_exact(groups.scales, target.scales.dtype)
        target.fill(groups if order is None else groups.rows(order.to(target.values.device)))

    def round(self, target: Held, values: Tensor) -> None:
        assert isinstance(target, FourBitWeight)
        target.fill(self.rounded(values))

    def product(self, weight: Held, bias: Tensor | None, dtype: torch.dtype) -> Product:
        assert isinstance(weight, FourBitWeight)
        return FourBitGemm(weight, bias, dtype)


class Int4(FourBit):
    """Whole numbers. What lies in words of 32 bits is unpacked, and cut where a part begins within a word."""

    numbers: Numbers = "int4"
    in_panels = in_one_order = True

    @property
    def scale_dtype(self) -> torch.dtype:
        return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[self.scheme.scale_dtype]


def nibbles(words: Tensor, axis: int) -> Tensor:
    """Words of eight codes, the lowest bits first, as eight codes along this axis."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & 15
    return codes.to(torch.uint8).movedim(-1, axis + 1).flatten(axis, axis + 1)


def inside(codes: Tensor, part: slice, axis: int) -> Tensor:
    """The codes of a part, from those of all words that it touches."""
    return codes.narrow(axis, part.start % WORD, part.stop - part.start)


def halves(packed: Tensor) -> Tensor:
    """Bytes of two codes, the low half first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _check_exact(scales: Tensor, dtype: torch.dtype) -> None:
    """Scales are held in sixteen bits: those of a file in another form have to fit."""
    if scales.dtype != dtype and not torch.equal(scales.to(dtype).to(scales.dtype), scales):
        raise CheckpointError(
            "scales_do_not_fit",
            f"Scales are stored as {scales.dtype}, and {dtype} does not hold them exactly.",
            "Load it with dtype fp32, which widens its weights, or use a version whose scales are in 16 bits.",
        )
