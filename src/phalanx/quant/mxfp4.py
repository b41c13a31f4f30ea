"""MXFP4: e2m1 numbers with a power of two for each 32 of them, as gpt-oss, DeepSeek V4 or compressed-tensors has it."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.four_bit import Groups, Numbers, round_mxfp4
from phalanx.quant.base import Pieces, Slices
from phalanx.quant.four_bit import FourBit, halves
from phalanx.spec.schemes import MX_BLOCK


class Mxfp4(FourBit):
    numbers: Numbers = "e2m1"
    scale_dtype = torch.uint8

    def codes(self, pieces: Pieces, slices: Slices) -> Tensor:
        columns, packed = slices[1], pieces["values"].view(torch.uint8)
        unit = MX_BLOCK if packed.dim() == 3 else 2
        return halves(packed.flatten(1)).narrow(1, columns.start % unit, columns.stop - columns.start)

    def rounded(self, values: Tensor) -> Groups:
        return round_mxfp4(values)
