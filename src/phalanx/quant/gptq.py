"""GPTQ with inputs in their own order: a word has eight inputs, one of zero points eight outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.four_bit import Groups, round_int4
from phalanx.quant.base import Pieces, Slices
from phalanx.quant.four_bit import Int4, inside, nibbles
from phalanx.spec.schemes import Role


class Gptq(Int4):
    checked: tuple[Role, ...] = ("zeros", "order")

    def codes(self, pieces: Pieces, slices: Slices) -> Tensor:
        return inside(nibbles(pieces["values"], 1), slices[1], 1)

    def zeros(self, pieces: Pieces, rows: slice) -> Tensor:
        return inside(nibbles(pieces["zeros"], 0), rows, 0) + self.scheme.zero_shift

    def rounded(self, values: Tensor) -> Groups:
        return round_int4(values, self.scheme.group, True, self.scale_dtype)

    def obstacle(self, pieces: Pieces, slices: Slices) -> str | None:
        largest = int(self.zeros(pieces, slices[0]).max()) if pieces["zeros"].numel() else 0
        if largest > 15:
            return f"has a zero point of {largest}, where four bits have 0 to 15"
        order, group = pieces.get("order"), self.scheme.group
        if order is not None and not torch.equal(order.long(), torch.arange(len(order)) // (group or len(order))):
            return f"has inputs in another order (act-order): its g_idx begins {order[:4].tolist()}"
        return None
