"""What a step takes: a curve over its tokens. Steps of a mixture of experts are dear at first, when every token more
wants experts that nobody has read yet, and cheap later: no line is near them all.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import log2

from phalanx.engine.step_line import StepLine

MEMORY = 0.8
"""What is left of a size's time with each further step of that size."""
STALE = 512
"""Steps after which a size that was not met again is forgotten: it may be worth another try."""
HOPE = 0.5
"""Of what a token takes on the line, what one is taken to take beyond the largest step that is known: where it turns
out to be more, little is lost, and otherwise nobody would find out.
"""
CHEAP = 0.02
"""The share of a step that one more token takes, as long as nothing is measured."""
_EXACT, _TO_DOUBLE = 16, 12
"""Up to so many tokens each number is a size of its own; beyond it there are so many sizes between one and twice it."""


@dataclass
class _Known:
    tokens: float
    seconds: float
    seen: int


def _size(tokens: int) -> int:
    return tokens if tokens <= _EXACT else _EXACT + round(_TO_DOUBLE * log2(tokens / _EXACT))


class StepCurve:
    """Through the steps of late, straight between the sizes that are known."""

    def __init__(self) -> None:
        self._line = StepLine()
        self._known: dict[int, _Known] = {}
        self._steps = 0
        self._points: list[tuple[float, float]] = []
        self._slope: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        self._line.observe(tokens, seconds)
        known = self._known.setdefault(_size(tokens), _Known(tokens, seconds, self._steps))
        known.tokens += (1 - MEMORY) * (tokens - known.tokens)
        known.seconds += (1 - MEMORY) * (seconds - known.seconds)
        known.seen = self._steps
        if self._steps % STALE == 0:
            self._known = {size: each for size, each in self._known.items() if self._steps - each.seen < STALE}
        self._points = self._rising()
        line = self._line.fit()
        self._slope = None if line is None else max(0.0, line.per_token)

    def _rising(self) -> list[tuple[float, float]]:
        """Tokens and seconds of what is known. No step takes longer than a larger one: it had to wait for something."""
        points: list[tuple[float, float]] = []
        for size in sorted(self._known, reverse=True):
            known = self._known[size]
            points.append((known.tokens, min(known.seconds, points[-1][1]) if points else known.seconds))
        return points[::-1]

    def of(self, tokens: float) -> float | None:
        """Seconds of a step of so many tokens; None as long as nothing is known."""
        points = self._points
        if not points:
            return None
        at = bisect_left(points, (tokens, 0.0))
        if 0 < at < len(points):
            (left, low), (right, high) = points[at - 1], points[at]
            return low + (high - low) * (tokens - left) / (right - left)
        nearest, seconds = points[min(at, len(points) - 1)]
        slope = CHEAP * seconds if self._slope is None else self._slope * (HOPE if tokens > nearest else 1.0)
        return max(seconds + slope * (tokens - nearest), 0.0)

    def share_of_one_more(self, tokens: int) -> float:
        """What one token more takes, to a step of so many: at most as much as each of those."""
        time, longer = self.of(tokens), self.of(tokens + 1)
        if time is None or longer is None:
            return CHEAP
        return min(longer / time - 1, 1 / tokens) if time > 0 else 1 / tokens
