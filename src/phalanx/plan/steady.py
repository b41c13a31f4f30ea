"""When a run of arrivals without end has been seen for long enough: it is steady, or it never will be."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Protocol, TypeVar

WINDOW = 150
"""Requests that are looked at together."""
_FEWEST = 4
_BATCHES = 8
_WARMING = 5
"""One part in this many of a run is taken as its beginning, when the batch fills up."""
_CLOSE = 0.04
"""Standard error of the means, as a share of them, at which a run is long enough."""
_GROWS = 0.04
"""Of the requests that came in the second half of a run, how many more may wait at its end than in its middle, beside
what chance does."""


class _Passing(Protocol):
    last: int


Passing = TypeVar("Passing", bound=_Passing)


class SteadyWatch:
    """Follows requests by windows of their order. `most`: windows after which a run ends in any case."""

    def __init__(self, most: int = 80) -> None:
        self._most = most
        self._arrivals: list[float] = []
        self._firsts: dict[int, float] = {}
        self._ttft: list[float] = []
        self._tpot: list[float] = []
        self._present: list[int] = []
        self._gone = 0
        self.has_seen_enough = False

    def sent(self, arrival: float) -> None:
        self._arrivals.append(arrival)

    def began(self, index: int, clock: float) -> None:
        self._firsts[index] = clock
        self._ttft.append(clock - self._arrivals[index])

    def ended(self, index: int, clock: float, tokens: int) -> None:
        first = self._firsts.pop(index)
        self._gone += 1
        if tokens > 1:
            self._tpot.append((clock - first) / (tokens - 1))
        if self._gone % WINDOW == 0:
            self._present.append(len(self._arrivals) - self._gone)
            windows = len(self._present)
            self.has_seen_enough = windows >= self._most or (
                windows >= _FEWEST and (self._is_close or (self.grows and windows >= 2 * _FEWEST))
            )

    @property
    def grows(self) -> bool:
        """Whether ever more requests are there: more than chance would leave."""
        half = len(self._present) // 2
        if half < 2:
            return False
        middle, end = (fmean(self._present[:half][-2:]), fmean(self._present[-2:]))
        came = WINDOW * (len(self._present) - half)
        return end - middle > _GROWS * came + 4 * sqrt(came)

    @property
    def _is_close(self) -> bool:
        return all(_error(_settled(times)) <= _CLOSE for times in (self._ttft, self._tpot) if times)

    def steady_part(self, passages: Sequence[Passing]) -> list[Passing]:
        """Those after the beginning, up to the first that has not ended: of those behind it, only short ones have."""
        unfinished = next((place for place, each in enumerate(passages) if each.last < 0), len(passages))
        return list(passages[unfinished // _WARMING : unfinished])


def _settled(times: Sequence[float]) -> Sequence[float]:
    return times[len(times) // _WARMING :]


def _error(times: Sequence[float]) -> float:
    """Standard error of a mean over what follows in time: by batches, since neighbours are alike."""
    size = len(times) // _BATCHES
    means = [fmean(times[place * size : (place + 1) * size]) for place in range(_BATCHES)]
    return stdev(means) / sqrt(_BATCHES) / fmean(means)
