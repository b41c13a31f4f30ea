"""AWQ as AutoAWQ writes it (gemm): a word has eight outputs, even ones in its low half, odd ones in its high half."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.four_bit import Groups, round_int4
from phalanx.quant.base import Pieces, Slices
from phalanx.quant.four_bit import Int4, inside, nibbles
from phalanx.spec.schemes import WORD

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each place in a word."""

_PLACES = tuple(ORDER.index(output) for output in range(WORD))


class Awq(Int4):
    def codes(self, pieces: Pieces, slices: Slices) -> Tensor:
        return inside(_outputs(pieces["values"]), slices[0], 0)

    def zeros(self, pieces: Pieces, rows: slice) -> Tensor:
        return inside(_outputs(pieces["zeros"]), rows, 0)

    def rounded(self, values: Tensor) -> Groups:
        return round_int4(values, self.scheme.group, True, self.scale_dtype)


def _outputs(words: Tensor) -> Tensor:
    """[words, columns] as [8 * words, columns] codes."""
    places = torch.tensor(_PLACES, device=words.device)
    return nibbles(words, 0).unflatten(0, (-1, WORD))[:, places].flatten(0, 1)
