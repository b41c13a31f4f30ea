"""Pace: how soon places become free, for those who are told to come back."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_REMEMBERED = 128
_LOOKED_BACK_S = 60.0
_UNKNOWN_S = 10
_LONGEST_S = 60


class FreeingPace:
    """Counts requests as they end. Whoever is refused is told the time in which so many have ended lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)

    def one_ended(self) -> None:
        self._ends.append(self._clock())

    def seconds_until(self, places: int) -> int:
        """Until so many places are free: at least 1, at most a minute."""
        now = self._clock()
        while self._ends and now - self._ends[0] > _LOOKED_BACK_S:
            self._ends.popleft()
        if not self._ends:
            return _UNKNOWN_S
        seconds = places * max(now - self._ends[0], 1.0) / len(self._ends)
        return min(max(math.ceil(seconds), 1), _LONGEST_S)
