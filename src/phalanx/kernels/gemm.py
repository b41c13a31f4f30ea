"""Products with a weight that stays put."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.four_bit import FourBitWeight
from phalanx.kernels.fp8 import E4M3, Fp8Weight, Quantised, converts_e4m3, dequantise
from phalanx.kernels.panels import Panels, unit_sums
from phalanx.kernels.panels import product as panel_product
from phalanx.kernels.quantise import quantise


class Held(Protocol):
    """A matrix in a quantised format, or a stack of them, as a rank holds it."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int: ...

    def numel(self) -> int: ...

    def __getitem__(self, index: int) -> Held: ...

    def split(self, rows: list[int]) -> Sequence[Held]:
        """The matrices that were stacked one below the other, as views."""
        ...

    def dequantised(self, dtype: torch.dtype) -> Tensor: ...

    def panels(self) -> Panels:
        """One matrix as a CPU multiplies it."""
        ...


class Product(Protocol):
    """y = x @ weight.T + bias. `takes_fp8`: x had better come in FP8."""

    weight: Any
    bias: Tensor | None
    takes_fp8: bool

    def __call__(self, x: Tensor | Quantised) -> Tensor: ...


_PAGE, _ROOM = 1024, 16

SKINNY = range(2, 17)
"""Rows for which the C kernel reads the weight faster than oneDNN and BLAS."""


class Gemm:
    """y = x @ weight.T + bias, in the weight's precision.

    One row and a few have kernels of their own, on a GPU and on a CPU. For more rows on a CPU, `pack` adds a copy of
    the weight in the order oneDNN's blocked kernels read it, which then need not be rearranged at every call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._packed: Tensor | None = None

    def pack(self) -> None:
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32 and self.weight.numel():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)

    takes_fp8 = False

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        assert isinstance(x, Tensor)
        if x.is_cuda and self.weight.numel():
            from phalanx.kernels.gpu import gemm as gpu

            return gpu.product(x, self.weight, self.bias)
        x = x.to(self.weight.dtype)
        if x.shape[0] <= SKINNY[-1] and cpu.runs(x):
            return one_row(x, self.weight, self.bias) if len(x) == 1 else skinny_gemm(x, self.weight, self.bias)
        if self._packed is None or x.shape[0] == 1:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


class PanelGemm:
    """y = x @ weight.T + bias on a CPU, with a weight that stays in the bits it is stored in.

    It is loaded row by row, as the checkpoint has it; `pack` then lays it out in panels, which take its place. With
    whole numbers a row has the same bits whatever rows are beside it. Sums are made by units, and of these a tree.
    """

    takes_fp8 = False

    def __init__(self, weight: Held | Panels, bias: Tensor | None = None, units: int = 1) -> None:
        self.weight = weight
        self.bias = bias
        self.units = units

    def pack(self) -> Panels:
        if not isinstance(self.weight, Panels):
            self.weight = replace(self.weight.panels(), units=self.units)
        return self.weight

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        assert isinstance(x, Tensor)
        return panel_product(x, self.pack(), self.bias)

    def unit_sums(self, x: Tensor) -> Tensor:
        """What the tree is made of, [units, rows, outputs]."""
        return unit_sums(x, self.pack(), self.bias)


class Fp8Gemm:
    """y = x @ weight.T + bias with a block-FP8 weight.

    For results in half precision x is brought to FP8 as well, if it does not come so; for float32, and on GPUs before
    compute capability 8.9, it is the weight that is widened, there by a kernel that reads it as it is stored.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight
        self.bias = bias
        self.dtype = dtype
        multiplied = dtype != torch.float32 and converts_e4m3(weight.values.device)
        self.takes_fp8 = multiplied and weight.numel() > 0

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        if not self.takes_fp8:
            assert isinstance(x, Tensor)
            if x.is_cuda and self.weight.numel() and x.dtype != torch.float32:
                from phalanx.kernels.gpu import gemm as gpu

                return gpu.widened_product(x, self.weight, self.bias)
            return F.linear(x, self.weight.dequantised(self.dtype), self.bias)
        x = x if isinstance(x, Quantised) else quantise(x)
        if x.values.is_cuda:
            from phalanx.kernels.gpu import gemm as gpu

            return gpu.fp8_product(x, self.weight, self.bias, self.dtype)
        return fp8_product_torch(x, self.weight, self.bias, self.dtype)


class FourBitGemm:
    """y = x @ weight.T + bias, with x as it is."""

    takes_fp8 = False

    def __init__(self, weight: FourBitWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight
        self.bias = bias
        self.dtype = dtype

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        assert isinstance(x, Tensor)
        known = self.weight.scales.dtype != E4M3 or converts_e4m3(x.device)
        if x.is_cuda and self.weight.numel() and x.dtype != torch.float32 and known:
            from phalanx.kernels.gpu import four_bit as gpu

            return gpu.product(x, self.weight, self.bias)
        return four_bit_product_torch(x, self.weight, self.bias)


def four_bit_product_torch(x: Tensor, weight: FourBitWeight, bias: Tensor | None) -> Tensor:
    """The definition."""
    return F.linear(x, weight.dequantised(x.dtype), bias)


def fp8_product_torch(x: Quantised, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The definition: the product of what both stand for."""
    widened = dequantise(x.values, x.scales, 1, torch.float32).to(dtype)
    return F.linear(widened, weight.dequantised(dtype), bias)


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear for a single row."""
    y = x.new_empty(1, weight.shape[0])
    cpu.call("row_product", x.contiguous(), weight, bias, y, *weight.shape, weight.stride(0))
    return y


def skinny_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, units: int = 1) -> Tensor:
    """F.linear for few rows: every weight is read once for all of them. Sums are made by units, and of these a tree."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = x.new_empty(rows, outputs)
    x = _spread(x) if rows > 4 and inputs % _PAGE == 0 else x.contiguous()
    cpu.call("skinny_gemm", x, weight, bias, y, rows, outputs, inputs, units, x.stride(0), weight.stride(0))
    return y


def _spread(x: Tensor) -> Tensor:
    """A copy with some room behind every row: rows that lie pages apart would drive each other out of the cache."""
    return x.new_empty(x.shape[0], x.shape[1] + _ROOM)[:, : x.shape[1]].copy_(x)
