"""Whether drafts pay, by the clock: steps with them against steps without. What a step takes is the whole time until
the next one can be read, with all that the host does meanwhile; no rule for single drafts knows that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PLAIN_STEPS = 3
"""Without drafts, before the first ones and now and then: of these the first is not counted, since what overlaps it
has drafts yet."""
BETWEEN = 64
"""Steps with drafts from one look at steps without to the next."""
ENOUGH = 16
"""Steps with drafts that are needed for a verdict."""
REST, LONGEST_REST = 128, 4096
"""Steps without drafts behind the first verdict against them; behind each further one twice as many."""
MEMORY = 0.95
MARGIN = 1.02
"""Drafts come true by chance: what is slower by less may be faster."""


@dataclass
class _Pace:
    """Tokens that a row gets, to the seconds it takes, of late."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = MEMORY * self.tokens + tokens
        self.seconds = MEMORY * self.seconds + seconds

    def beats(self, other: _Pace) -> bool:
        return self.tokens * other.seconds > MARGIN * other.tokens * self.seconds


@dataclass
class _Trial:
    plain: _Pace = field(default_factory=_Pace)
    drafted: _Pace = field(default_factory=_Pace)
    plain_left: int = PLAIN_STEPS
    since: int = 0
    rest: int = REST

    def with_drafts(self, tokens: float, seconds: float) -> None:
        self.drafted.add(tokens, seconds)
        self.since += 1
        if self.since % ENOUGH:
            return
        if self.plain.beats(self.drafted):
            self.plain_left, self.rest = self.rest, min(2 * self.rest, LONGEST_REST)
            self.drafted, self.since = _Pace(), 0
        elif self.since == BETWEEN:
            self.plain_left, self.rest, self.since = PLAIN_STEPS, REST, 0


class Trials:
    """One for every size of a batch: rows are cheap in a small one and dear in a large one."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}
        self._plain_before = 0

    def wants_plain(self, rows: int) -> bool:
        """Whether the next step of so many rows had better have no drafts."""
        return self._of(rows).plain_left > 0

    def with_drafts(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of so many rows that made so many tokens."""
        self._of(rows).with_drafts(tokens / rows, seconds)
        self._plain_before = 0

    def without_drafts(self, rows: int, seconds: float | None) -> None:
        """A step of so many rows; how long it took counts only where it held no prompt."""
        trial = self._of(rows)
        trial.plain_left = max(0, trial.plain_left - 1)
        if seconds is not None and self._plain_before == rows:
            trial.plain.add(1.0, seconds)
        self._plain_before = rows if seconds is not None else 0

    def _of(self, rows: int) -> _Trial:
        return self._trials.setdefault((rows * rows).bit_length(), _Trial())
