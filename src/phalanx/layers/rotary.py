"""Rotary embedding at the positions of a step, for every rope that layers of the model have."""

from __future__ import annotations

from torch import Tensor

from phalanx.kernels.rotary import cos_and_sin, inverse_frequencies
from phalanx.layers.place import Place
from phalanx.spec.rope import Rope


class Rotary:
    """No table of positions: a step computes those it needs, once for all layers that turn alike."""

    def __init__(self, place: Place, ropes: set[Rope]) -> None:
        self._dtype = place.dtype
        self._frequencies = {rope: inverse_frequencies(rope).to(place.device) for rope in ropes}

    def __call__(self, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin at these positions, [tokens, 1, rotary_dim]."""
        return cos_and_sin(positions, self._frequencies[rope], rope.attention_factor, self._dtype)
