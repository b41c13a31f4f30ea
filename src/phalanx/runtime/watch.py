"""Watch: knows which rank on another machine has fallen silent, and tells the ranks that the engine lives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from phalanx.engine.step_plan import Beat
from phalanx.runtime.channel import Beacon
from phalanx.runtime.links import Links
from phalanx.runtime.pulse import BEAT_EVERY_S

LOADING_PATIENCE_S = 60.0
SERVING_PATIENCE_S = 5.0
_BEATS_KEPT = 64


class Watch:
    """A thread that hears beats and flashes the beacon, whatever the engine itself is busy with or waits for.

    A rank that loads may be slow to give its first sign, or be held up by a large file; one that serves may not.
    """

    def __init__(self, links: Links, beacon: Beacon, ranks: Iterable[int]) -> None:
        self.patience_s = LOADING_PATIENCE_S
        self.lost: list[int] = []
        self._links = links
        self._beacon = beacon
        self._heard = dict.fromkeys(ranks, time.monotonic())
        self._beats: deque[Beat] = deque(maxlen=_BEATS_KEPT)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        looked = flashed = time.monotonic()
        while not self._stopping.is_set():
            if time.monotonic() - flashed >= BEAT_EVERY_S:
                self._beacon.flash()
                flashed = time.monotonic()
            beat = self._links.next_beat(int(BEAT_EVERY_S * 1e3 / 2))
            now = time.monotonic()
            if now - looked > SERVING_PATIENCE_S / 2:
                self._heard = dict.fromkeys(self._heard, now)
            looked = now
            if beat is not None:
                self._heard[beat.rank] = now
                self._beats.append(beat)
            self.lost = [rank for rank, heard in self._heard.items() if now - heard > self.patience_s]

    def silence_s(self, rank: int) -> float:
        """Since this rank gave a sign of life. If this process itself was stopped, it counts from then on."""
        return time.monotonic() - self._heard[rank]

    def beats(self) -> list[Beat]:
        """What was heard since the last call."""
        beats = []
        while self._beats:
            beats.append(self._beats.popleft())
        return beats

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
