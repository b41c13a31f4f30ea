"""What mixers have in common that keep nothing of a sequence but its tokens."""

from __future__ import annotations

from torch import Tensor


class Stateless:
    def states(self) -> list[Tensor]:
        return []

    def allocate_states(self, places: int) -> None:
        """There are none."""
