"""Speculation with a given acceptance: what steps of drafts take, whatever the weights. Answers are then of no use."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.engine.request import Request
from phalanx.engine.speculation import RankDrafter, Speculation

SPREAD = 2**0.5 - 1
"""A number whose multiples fill the stretch from 0 to 1 evenly, and those of 2, 4, ... 64 too: a row of a batch has its
share as well as all rows together.
"""


class AnyTokens:
    """Drafts where no ranks make them."""

    def propose(self, request: Request, most: int) -> list[int]:
        return [0] * most

    def may_follow(self, request: Request) -> bool:
        return True

    def forget(self, request: Request) -> None:
        """It knows no more of one request than of another."""


class ForcedSpeculation(Speculation):
    """Each draft is taken for right with this chance, whatever was drawn in its place. There are drafts even where
    steps without them would be faster: what they take is to be known.
    """

    def __init__(self, most: int, acceptance: float, by_ranks: bool) -> None:
        super().__init__(RankDrafter() if by_ranks else AnyTokens(), most, drafts_stay=by_ranks)
        self._acceptance, self._rows = acceptance, 0

    def _wants_plain(self, rows: int) -> bool:
        return False

    def right(self, drafts: Sequence[int], drawn: Sequence[int]) -> int:
        """Numbers that fill the stretch from 0 to 1 more evenly than random ones: a short run has its share."""
        self._rows += 1
        number = self._rows * SPREAD % 1.0
        return sum(number < self._acceptance**place for place in range(1, len(drafts) + 1))


class AllDrafts(ForcedSpeculation):
    """As many drafts as there may be, whatever they cost: what their steps need is then there."""

    def _share_of_one_more(self, tokens: int) -> float:
        return 0.0

    def ahead(self, requests: Sequence[Request]) -> int:
        return self.most if requests else 0
