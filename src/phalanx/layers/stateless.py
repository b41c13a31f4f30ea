"""What mixers have in common that keep nothing of a sequence but its tokens."""

from __future__ import annotations

from torch import Tensor


class Stateless:
    def states(self) -> list[Tensor]:
        return []

    def allocate_states(self, places: int) -> None:
        """There are none."""

    def working_bytes(self, tokens: int, rows: int) -> int:
        """What a step of so many tokens, or of so many that decode, takes beside its widest product."""
        return 0
