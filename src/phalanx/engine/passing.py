"""How much of a step a long prompt leaves to shorter ones."""

from __future__ import annotations

SHARE = 1 / 13
"""Of what the decodes leave, over the whole of a long prompt. It then takes 13/12 of its time; what is left to a tenth
more is for what it owes at first and for steps that are no whole number."""
OWED_AT_FIRST = 1 / 200
"""Of a long prompt's tokens: shorter ones that come at its beginning need not wait until it has saved up for them."""
MOST_OF_A_STEP = 2
"""One part in this many of a step may be what has been saved up."""


class Passing:
    """What the long prompt that is being computed owes to those that pass it: a share of every step, saved up while
    nobody passes. So a short prompt is computed in few steps, and the long one still loses no more than its share.
    """

    def __init__(self) -> None:
        self._prompt: int | None = None
        self._owed = 0.0

    def part(self, prompt: int, rest: int, budget: int) -> int:
        """Tokens of this step that others may have, while `rest` tokens of the long prompt are to be computed."""
        if prompt != self._prompt:
            self._prompt, self._owed = prompt, OWED_AT_FIRST * rest
        self._owed = min(self._owed + SHARE * budget, max(self._owed, budget))
        return min(int(self._owed), budget // MOST_OF_A_STEP)

    def took(self, tokens: int) -> None:
        self._owed -= tokens
