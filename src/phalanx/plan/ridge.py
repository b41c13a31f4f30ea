"""Ridge regression of many rows on many effects, of which each row has few. Needs numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
_CLOSE = 1e-5
"""How near to the best effects, as a share of them, the search ends."""
_MOST_TURNS = 500


@dataclass(frozen=True)
class Sparse:
    """A matrix by its entries."""

    rows: Array
    columns: Array
    values: Array
    height: int
    width: int

    def times(self, vector: Array) -> Array:
        return np.bincount(self.rows, self.values * vector[self.columns], self.height)

    def transposed_times(self, vector: Array) -> Array:
        return np.bincount(self.columns, self.values * vector[self.rows], self.width)

    def squares(self, weight: Array) -> Array:
        """The diagonal of its weighted normal equations."""
        return np.bincount(self.columns, self.values**2 * weight[self.rows], self.width)


def solve_ridge(design: Sparse, weight: Array, stiff: Array, target: Array, start: Array) -> Array:
    """Conjugate gradients, each unknown in its own scale."""
    scale = design.squares(weight) + stiff

    def normal(vector: Array) -> Array:
        return design.transposed_times(weight * design.times(vector)) + stiff * vector

    found = start.copy()
    wanted = design.transposed_times(weight * target)
    off = wanted - normal(found)
    steered = off / scale
    direction, power = steered, off @ steered
    enough = _CLOSE**2 * (wanted @ (wanted / scale))
    for _ in range(_MOST_TURNS):
        if power <= enough:
            break
        bent = normal(direction)
        along = power / (direction @ bent)
        found, off = found + along * direction, off - along * bent
        steered = off / scale
        before, power = power, off @ steered
        direction = steered + power / before * direction
    return found
