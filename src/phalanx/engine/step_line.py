"""What a step takes: a line over its tokens."""

from __future__ import annotations

from typing import NamedTuple

STEP_MEMORY = 0.98
_LEAST_SPREAD = 1e-3


class CostLine(NamedTuple):
    """Seconds of a step, and of each of its tokens."""

    per_step: float
    per_token: float

    def of(self, tokens: int) -> float:
        return self.per_step + self.per_token * tokens


class StepLine:
    """The line through the steps of late."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        self._weight = STEP_MEMORY * self._weight + 1.0
        self._tokens = STEP_MEMORY * self._tokens + tokens
        self._seconds = STEP_MEMORY * self._seconds + seconds
        self._squares = STEP_MEMORY * self._squares + tokens * tokens
        self._products = STEP_MEMORY * self._products + tokens * seconds

    @property
    def mean(self) -> float:
        """What a step took of late."""
        return self._seconds / self._weight if self._weight else 0.0

    def fit(self) -> CostLine | None:
        """None as long as all steps had much the same size."""
        spread = self._weight * self._squares - self._tokens**2
        if spread <= _LEAST_SPREAD * self._tokens**2:
            return None
        slope = (self._weight * self._products - self._tokens * self._seconds) / spread
        return CostLine((self._seconds - slope * self._tokens) / self._weight, slope)
