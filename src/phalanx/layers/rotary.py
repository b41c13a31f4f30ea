"""The rotary table of a model, shared by its layers."""

from __future__ import annotations

from torch import Tensor

from phalanx.kernels.rotary import rotary_table
from phalanx.layers.place import Place


class Rotary:
    def __init__(self, place: Place, max_positions: int) -> None:
        cos, sin = rotary_table(place.spec.rope, max_positions)
        self.cos = cos.to(place.device, place.dtype)[:, None]
        self.sin = sin.to(place.device, place.dtype)[:, None]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin at these positions, [tokens, 1, rotary_dim]."""
        return self.cos[positions], self.sin[positions]
