"""Speculation: how many tokens of an answer are guessed ahead, and what became of the guesses.

A guess changes no answer: tokens are drawn by seed and position, and only a draft that equals the token drawn is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phalanx.engine.request import Request
from phalanx.engine.step_line import STEP_MEMORY, StepLine

TRUSTED = 2.0
"""How many drafts that came true a request has to its credit before its first, and half as many that did not."""
MEMORY = 0.9
"""What is left of a request's record with each further row of drafts."""
FORGIVENESS = 0.995
"""What is left of it with each token that was made without: in time a failed drafter gets another chance."""
WORTH_WAITING = 0.1
"""How many drafts have to come true, to each row of a step, for all rows to wait for them."""
CHEAP = 0.02
"""The share of a step that one more row takes, as long as nothing is measured."""


class Drafter(Protocol):
    def propose(self, request: Request, most: int) -> list[int]:
        """Tokens that may follow those that are known of a request."""
        ...

    def may_follow(self, request: Request) -> bool:
        """Whether there may be drafts once a token that is on its way is read."""
        ...

    def forget(self, request: Request) -> None: ...


class RankDrafter:
    """The ranks make drafts, with every step those for the next one: they come with its tokens."""

    def propose(self, request: Request, most: int) -> list[int]:
        return request.drafts[:most]

    def may_follow(self, request: Request) -> bool:
        return True

    def forget(self, request: Request) -> None:
        request.drafts = []


class SpeculationTotals(msgspec.Struct, array_like=True):
    """Rows of drafts, their drafts, those of them that came true, and these by their place in the row."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    by_position: list[int] = msgspec.field(default_factory=list)


@dataclass
class _Record:
    """Of one request: drafts that came true, and those that did not."""

    right: float = TRUSTED
    wrong: float = TRUSTED / 2

    @property
    def chance(self) -> float:
        return self.right / (self.right + self.wrong)


class Speculation:
    """Drafts for requests whose tokens are all known, as long as what they bring is worth the longer step.

    A draft is worth computing if, to the tokens that the step makes anyway, its chance is more than the time it adds is
    to the step's.
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        self.most = most
        self.by_ranks = isinstance(drafter, RankDrafter)
        self.coming = 0
        """Drafts that ranks make with the last step that was planned."""
        self._draft_s: float | None = None
        self.totals = SpeculationTotals(by_position=[0] * most)
        self._drafter = drafter
        self._line = StepLine()
        self._records: dict[int, _Record] = {}

    def propose(self, requests: Sequence[Request], rows: int, room: int) -> dict[int, list[int]]:
        """Drafts by request, in a step of so many rows that has room for as many tokens more."""
        share = self._share_of_one_more(rows)
        if room <= 0 or rows * share >= 1:
            return {}
        hopeful = [(self._record(request).chance, request) for request in requests]
        proposed = {
            request.id: (chance, drafts)
            for chance, request in hopeful
            if chance > rows * share and (drafts := self._drafter.propose(request, self.most))
        }
        taken = dict.fromkeys(proposed, 0)
        queue = [(-chance, id) for id, (chance, _) in proposed.items()]
        heapq.heapify(queue)
        made, tokens = float(rows), rows
        while queue and room > 0:
            worth, id = heapq.heappop(queue)
            if -worth <= made * self._share_of_one_more(tokens):
                break
            made, tokens, room = made - worth, tokens + 1, room - 1
            taken[id] += 1
            chance, drafts = proposed[id]
            if taken[id] < len(drafts):
                heapq.heappush(queue, (worth * chance, id))
        return {id: proposed[id][1][:count] for id, count in taken.items() if count}

    def is_worth_waiting(self, requests: Sequence[Request], rows: int) -> bool:
        """Whether the tokens on their way to these are better read before the next ones, in a step of so many rows:
        drafts may follow them, and enough of those may come true.
        """
        if not requests or (self.by_ranks and not self.coming):
            return False
        least = rows * self._share_of_one_more(rows)
        chances = ((self._record(request).chance, request) for request in requests)
        hope = sum(chance for chance, request in chances if chance > least and self._drafter.may_follow(request))
        return hope > WORTH_WAITING * rows

    def ahead(self, requests: Sequence[Request]) -> int:
        """How many drafts the ranks make of each of these with the next step: as many as are worth their time there,
        and that of the longer rows behind it.
        """
        if not self.by_ranks or not requests:
            return 0
        chances = [self._record(request).chance for request in requests]
        rows = len(chances)
        each = self._draft_s / self._line.mean if self._draft_s and self._line.mean else CHEAP
        added = each + rows * self._share_of_one_more(rows)
        made, time, worth = float(rows), 1.0, chances
        for number in range(self.most):
            if sum(worth) / made <= added / time:
                return number
            made, time = made + sum(worth), time + added
            worth = [before * chance for before, chance in zip(worth, chances, strict=True)]
        return self.most

    def came(self, requests: Sequence[Request], drafts: Sequence[list[int]]) -> None:
        """Drafts that ranks have made of these requests, or none."""
        if self.by_ranks:
            for number, request in enumerate(requests):
                request.drafts = drafts[number] if drafts else []

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        record, totals = self._record(request), self.totals
        record.right = MEMORY * record.right + accepted
        record.wrong = MEMORY * record.wrong + (accepted < drafted)
        totals.drafts += 1
        totals.draft_tokens += drafted
        totals.accepted_tokens += accepted
        for position in range(accepted):
            totals.by_position[position] += 1

    def observe(self, tokens: int, seconds: float, ahead: int = 0, draft_s: float = 0.0) -> None:
        """What a step without prompts took, and beside it the drafts that ranks made, so many of every row."""
        self._line.observe(tokens, seconds)
        if ahead:
            before = draft_s / ahead if self._draft_s is None else self._draft_s
            self._draft_s = STEP_MEMORY * before + (1 - STEP_MEMORY) * draft_s / ahead
        for record in self._records.values():
            record.right = TRUSTED + (record.right - TRUSTED) * FORGIVENESS
            record.wrong = TRUSTED / 2 + (record.wrong - TRUSTED / 2) * FORGIVENESS

    def forget(self, request: Request) -> None:
        self._records.pop(request.id, None)
        self._drafter.forget(request)

    def _share_of_one_more(self, tokens: int) -> float:
        """What one token more takes, to a step of so many."""
        line = self._line.fit()
        if line is None:
            return CHEAP
        time = line.of(tokens)
        return min(max(line.per_token / time, 0.0), 1 / tokens) if time > 0 else 1 / tokens

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request.id)
        if record is None:
            record = self._records[request.id] = _Record()
        return record
