"""Recent: what was heard since someone last looked, as it was, for those who need more than counters."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

from phalanx.server.messages import Books, Stepped


@dataclass(frozen=True)
class Heard:
    """What happened in `seconds`. Of the books, the sums over time: divided by `seconds` they are means."""

    seconds: float
    first_token: array[float]
    token_gap: array[float]
    output_tokens: int
    running_s: float
    waiting_s: float
    held_block_s: float
    working_s: float


@dataclass
class Recent:
    """Hears of steps and tokens until someone takes what there is. Somebody must: it grows until then."""

    first_token: array[float] = field(default_factory=lambda: array("d"))
    token_gap: array[float] = field(default_factory=lambda: array("d"))
    books: Books | None = None
    _num_blocks: int = 0
    _output_tokens: int = 0
    _running_s: float = 0.0
    _waiting_s: float = 0.0
    _held_block_s: float = 0.0
    _working_s: float = 0.0
    _at: float = field(default_factory=lambda: time.monotonic())
    _taken_at: float = field(default_factory=lambda: time.monotonic())

    def engine_started(self, num_blocks: int) -> None:
        """A new engine: nothing runs on it yet."""
        self._pass_time()
        self.books = None
        self._num_blocks = num_blocks

    def engine_lost(self) -> None:
        """What ran on the engine no longer does."""
        self.engine_started(0)

    def stepped(self, report: Stepped) -> None:
        self._pass_time()
        self.books = report.books
        self._output_tokens += len(report.tokens)

    def take(self) -> Heard:
        self._pass_time()
        heard = Heard(
            max(self._at - self._taken_at, 1e-9),
            self.first_token,
            self.token_gap,
            self._output_tokens,
            self._running_s,
            self._waiting_s,
            self._held_block_s,
            self._working_s,
        )
        self.first_token, self.token_gap = array("d"), array("d")
        self._output_tokens = 0
        self._running_s = self._waiting_s = self._held_block_s = self._working_s = 0.0
        self._taken_at = self._at
        return heard

    def _pass_time(self) -> None:
        """The books stood as they are since they were last told."""
        now = time.monotonic()
        since, self._at = now - self._at, now
        if self.books is not None:
            self._running_s += self.books.running * since
            self._waiting_s += self.books.waiting * since
            self._held_block_s += (self._num_blocks - self.books.free_blocks) * since
            self._working_s += since if self.books.running else 0.0
