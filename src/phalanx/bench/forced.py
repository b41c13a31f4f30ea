"""Speculation with a given acceptance: what steps of drafts take, whatever the weights. Answers are then of no use."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile

from phalanx.engine.request import Request
from phalanx.engine.speculation import RankDrafter, Speculation


class AnyTokens:
    """Drafts where no ranks make them."""

    def propose(self, request: Request, most: int) -> list[int]:
        return [0] * most

    def may_follow(self, request: Request) -> bool:
        return True

    def forget(self, request: Request) -> None:
        """It knows no more of one request than of another."""


class ForcedSpeculation(Speculation):
    """Each draft is taken for right with this chance, whatever was drawn in its place."""

    def __init__(self, most: int, acceptance: float, by_ranks: bool) -> None:
        super().__init__(RankDrafter() if by_ranks else AnyTokens(), most)
        self._acceptance, self._random = acceptance, random.Random(0)

    def right(self, drafts: Sequence[int], drawn: Sequence[int]) -> int:
        return sum(1 for _ in takewhile(lambda _: self._random.random() < self._acceptance, drafts))


class AllDrafts(ForcedSpeculation):
    """As many drafts as there may be, whatever they cost: what their steps need is then there."""

    def _share_of_one_more(self, tokens: int) -> float:
        return 0.0

    def ahead(self, requests: Sequence[Request]) -> int:
        return self.most if requests else 0
