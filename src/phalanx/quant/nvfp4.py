"""NVFP4: e2m1 numbers with an e4m3 scale for each 16 of them, and a factor for the matrix (ModelOpt) or one over it."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.four_bit import Groups, Numbers, round_nvfp4
from phalanx.quant.base import Pieces, Slices
from phalanx.quant.four_bit import FourBit, halves


class Nvfp4(FourBit):
    numbers: Numbers = "e2m1"
    scale_dtype = torch.float8_e4m3fn

    def codes(self, pieces: Pieces, slices: Slices) -> Tensor:
        columns = slices[1]
        return halves(pieces["values"]).narrow(1, columns.start % 2, columns.stop - columns.start)

    def rounded(self, values: Tensor) -> Groups:
        return round_nvfp4(values)
