"""Who looks at the residual stream while a step runs: for ranks that disagree, and for numbers that are none."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from phalanx.kernels.digest import digests_into


class LayerWatch(Protocol):
    def mark(self, place: int, stream: Tensor) -> None:
        """The residual stream as layer `place` takes it; behind the last layer, as the head does."""
        ...


LOOKED_AT = 8
"""Layers that a CPU looks at in a step, besides the last."""
_NOBODYS = -1


class Canary:
    """Digests of the stream, which must be the same on every rank: it has gone through the same sums everywhere.

    They are part of the step on its own device, so that a graph can hold them. What differs in the stream stays in it
    to the end, so the last two find it, and that is all a GPU can afford in every step; those of every layer tell where
    it came in. A CPU takes some of them by turns.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.marks = torch.zeros(layers + 1, dtype=torch.int64, device=device)
        self._last = layers
        self._usually_apart = -(-layers // LOOKED_AT)
        self._apart, self._turn = self._usually_apart, _NOBODYS
        self._put = digests_into(self.marks)

    def begin(self, step: int) -> None:
        """Ranks look at the same layers of a step: its number says at which. What a graph holds stays as it is."""
        if self.marks.is_cpu:
            self._turn = step % self._apart
            self.marks.zero_()

    def look_at_every_layer(self, every: bool) -> None:
        self._apart, self._turn = (1, 0) if every else (self._usually_apart, _NOBODYS)
        self.marks.zero_()

    def mark(self, place: int, stream: Tensor) -> None:
        if place >= self._last - 1 or place % self._apart == self._turn:
            self._put(place, stream)


class Finite:
    """Finds the first place at which the stream holds NaN or infinity."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, Tensor]] = []

    def mark(self, place: int, stream: Tensor) -> None:
        self._marks.append((place, stream.isfinite().all()))

    def broke_in(self) -> str | None:
        """The part of the model behind which the stream is not finite any more."""
        found = next((place for place, finite in self._marks if not finite), None)
        if found is None:
            return None
        return f"layer {found - 1}" if found else "the embedding"
