"""MXFP4: e2m1 numbers with a power of two for each 32 of them, as gpt-oss, DeepSeek V4 or compressed-tensors has it."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.kernels.four_bit import Groups, Numbers, round_mxfp4
from phalanx.kernels.gemm import Held
from phalanx.quant.base import Pieces, Slices
from phalanx.quant.four_bit import FourBit, halves
from phalanx.spec.schemes import MX_BLOCK

LARGEST_SCALE = 160
"""The byte of 2^33. The GPU's kernels have room for scales up to there; larger ones are in no model."""


class Mxfp4(FourBit):
    numbers: Numbers = "e2m1"
    scale_dtype = torch.uint8

    def codes(self, pieces: Pieces, slices: Slices) -> Tensor:
        columns, packed = slices[1], pieces["values"].view(torch.uint8)
        unit = MX_BLOCK if packed.dim() == 3 else 2
        return halves(packed.flatten(1)).narrow(1, columns.start % unit, columns.stop - columns.start)

    def fill(self, target: Held, pieces: Pieces, slices: Slices, order: Tensor | None) -> None:
        scales = pieces["scales"].view(torch.uint8)
        if scales.numel() and (largest := int(scales.max())) > LARGEST_SCALE:
            raise CheckpointError(
                "bad_values",
                f"A scale is 2^{largest - 127}, where weights have some below 2^{LARGEST_SCALE - 126}.",
                "The file seems damaged: download it again.",
            )
        super().fill(target, pieces, slices, order)

    def rounded(self, values: Tensor) -> Groups:
        return round_mxfp4(values)
