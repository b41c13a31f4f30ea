"""Linear layers: column-parallel in, row-parallel out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from phalanx.kernels.fp8 import Fp8Weight, Quantised
from phalanx.kernels.gemm import Fp8Gemm, Gemm
from phalanx.layers.place import Place

Part = Tensor | Fp8Weight
"""The memory that this rank's share of a checkpoint tensor goes to."""


def _product(place: Place, names: Sequence[str], rows: list[int], columns: int, bias: Tensor | None) -> Gemm | Fp8Gemm:
    if all(place.keeps_fp8(f"{name}.weight") for name in names):
        weight = Fp8Weight.empty(sum(rows), columns, row_block=place.row_block(rows), device=place.device)
        return Fp8Gemm(weight, bias, place.dtype)
    return Gemm(place.empty(sum(rows), columns), bias)


class ColumnParallelLinear:
    """Several projections of one input as one product. Each rank computes its own output rows: nothing to exchange."""

    def __init__(self, place: Place, names: Sequence[str]) -> None:
        self.names = names
        bias = place.has(f"{names[0]}.bias")
        self.rows = [place.share_of(f"{name}.weight")[0] for name in names]
        columns = place.share_of(f"{names[0]}.weight")[1]
        self.product = _product(place, names, self.rows, columns, place.empty(sum(self.rows)) if bias else None)

    def parts(self) -> Iterator[tuple[str, Part]]:
        for name, weight in zip(self.names, self.product.weight.split(self.rows), strict=True):
            yield f"{name}.weight", weight
        if self.product.bias is not None:
            for name, bias in zip(self.names, self.product.bias.split(self.rows), strict=True):
                yield f"{name}.bias", bias

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        return self.product(x)


class RowParallelLinear:
    """Each rank multiplies its own input columns and returns its part of a sum over ranks, which the next norm does.

    The bias counts once: rank 0 has it in its part.
    """

    def __init__(self, place: Place, name: str) -> None:
        self.name = name
        bias = place.has(f"{name}.bias")
        rows, columns = place.share_of(f"{name}.weight")
        self.bias = place.empty(rows) if bias else None
        self.product = _product(place, [name], [rows], columns, self.bias if place.group.rank == 0 else None)

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield f"{self.name}.weight", self.product.weight
        if self.bias is not None:
            yield f"{self.name}.bias", self.bias

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        return self.product(x)
