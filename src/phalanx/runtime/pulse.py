"""A rank's sign of life, told by a thread of its own: it goes on while a step runs and ends when the process stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.engine.step_plan import Beat, Totals
from phalanx.engine.whereabouts import Whereabouts

BEAT_EVERY_S = 0.5
_LONG_S = 2.0
"""A step that takes longer is looked into."""
ENGINE_LOST_AFTER_S = 10.0
"""A rank on another machine ends when the engine gave no sign of life for so long."""


class Pulse:
    """Knows which step this rank is in and since when, and what it has done so far."""

    def __init__(self, rank: int, totals: Totals, where: Whereabouts) -> None:
        self._rank = rank
        self._totals = totals
        self._where = where
        self._step = 0
        self._since: float | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self.begin(number)
        try:
            yield
        finally:
            self.end(busy=False)

    def begin(self, number: int) -> None:
        """This step is launched; one before it may still run."""
        self._step, self._since = number, self._since or time.monotonic()

    def end(self, busy: bool) -> None:
        """The oldest step has ended. Busy: another one is launched already."""
        self._since = time.monotonic() if busy else None

    def beat(self) -> Beat:
        since, where = self._since, self._where
        busy = 0.0 if since is None else time.monotonic() - since
        if where.look is not None and busy > _LONG_S:
            where.look()
        return Beat(self._rank, self._step, busy, self._totals, where.read())


def every_beat(tell: Callable[[], None]) -> None:
    """Call `tell` twice a second from a thread that ends with the process."""

    def run() -> None:
        while True:
            tell()
            time.sleep(BEAT_EVERY_S)

    threading.Thread(target=run, name="pulse", daemon=True).start()
