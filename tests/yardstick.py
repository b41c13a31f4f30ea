"""Processor time, as many times that of plain Python: a slow machine, or one that others use too, is slow for both."""

from __future__ import annotations

import time
from collections.abc import Callable

_STEPS = 300_000


def is_done_within(plain_works: float, work: Callable[[], object]) -> bool:
    """Whether it takes no more than so many times 300,000 plain steps right behind it, at one of three times."""
    return any(_seconds(work) <= plain_works * _seconds(_plain_work) for _ in range(3))


def _seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def _plain_work() -> None:
    sums: dict[int, float] = {}
    for step in range(_STEPS):
        sums[step & 1023] = sums.get(step & 1023, 0.0) + step * 0.5
