"""compressed-tensors' pack-quantized (W4A16): a word has eight inputs, one of zero points eight outputs."""

from __future__ import annotations

from torch import Tensor

from phalanx.kernels.four_bit import Groups, round_int4
from phalanx.quant.base import Pieces, Slices
from phalanx.quant.four_bit import Int4, inside, nibbles


class PackedInt4(Int4):
    def codes(self, pieces: Pieces, slices: Slices) -> Tensor:
        return inside(nibbles(pieces["values"], 1), slices[1], 1)

    def zeros(self, pieces: Pieces, rows: slice) -> Tensor | None:
        return inside(nibbles(pieces["zeros"], 0), rows, 0) if "zeros" in pieces else None

    def rounded(self, values: Tensor) -> Groups:
        return round_int4(values, self.scheme.group, self.scheme.piece("zeros") is not None, self.scale_dtype)
