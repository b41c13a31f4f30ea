"""Products with a weight that stays put."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import cpu

SKINNY = range(2, 17)
"""Rows for which the C kernel reads the weight faster than oneDNN and BLAS."""


class Gemm:
    """y = x @ weight.T + bias.

    On a GPU a single row has a kernel of its own. On a CPU it is the library's, which reads the plain weight at memory
    speed; for more rows, `pack` adds a copy of the weight in the order oneDNN's blocked kernels read it, which then
    need not be rearranged at every call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._packed: Tensor | None = None

    def pack(self) -> None:
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32 and self.weight.numel():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.shape[0] == 1 and self.weight.numel():
            from phalanx.kernels import gpu

            return gpu.matrix_vector(x, self.weight, self.bias)
        if x.shape[0] in SKINNY and cpu.runs(x):
            return skinny_gemm(x, self.weight, self.bias)
        if self._packed is None or x.shape[0] == 1:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def skinny_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear for few rows: every weight is read once for all of them."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = x.new_empty(rows, outputs)
    cpu.call("skinny_gemm", x.contiguous(), weight, bias, y, rows, outputs, inputs)
    return y
