"""Speculation with a given acceptance: what steps of drafts take, whatever the weights."""

from __future__ import annotations

import random
from collections.abc import Sequence

from phalanx.engine.request import Request
from phalanx.engine.speculation import RankDrafter, Speculation

Answers = dict[tuple[int, ...], list[int]]
"""What follows a prompt."""


class KnownAnswers:
    """Drafts where no ranks make them: those of an earlier run."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def propose(self, request: Request, most: int) -> list[int]:
        done = len(request.tokens) - request.prompt_length
        return self._answers[tuple(request.tokens[: request.prompt_length])][done : done + most]

    def may_follow(self, request: Request) -> bool:
        return True

    def forget(self, request: Request) -> None:
        """It knows no more of one request than of another."""


class ForcedSpeculation(Speculation):
    """Each draft comes true with this chance. Ranks that make drafts do all their work; others take their place."""

    def __init__(self, answers: Answers, most: int, acceptance: float, by_ranks: bool) -> None:
        self._known, self._acceptance, self._random = KnownAnswers(answers), acceptance, random.Random(0)
        super().__init__(RankDrafter() if by_ranks else self._known, most)

    def propose(self, requests: Sequence[Request], rows: int, room: int) -> dict[int, list[int]]:
        by_id = {request.id: request for request in requests}
        proposed = super().propose(requests, rows, room)
        known = {id: self._known.propose(by_id[id], len(drafts)) for id, drafts in proposed.items()}
        return {id: self._bent(drafts) for id, drafts in known.items() if drafts}

    def _bent(self, drafts: list[int]) -> list[int]:
        return [token if self._random.random() < self._acceptance else token ^ 1 for token in drafts]
