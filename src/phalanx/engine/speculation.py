"""Speculation: how many tokens of an answer are guessed ahead, and what became of the guesses.

A guess changes no answer: tokens are drawn by seed and position, and only a draft that equals the token drawn is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import msgspec

from phalanx.engine.agenda import Agenda
from phalanx.engine.request import Request
from phalanx.engine.step_curve import CHEAP, StepCurve
from phalanx.engine.step_line import STEP_MEMORY
from phalanx.engine.step_plan import UNREAD
from phalanx.engine.trials import Trials

TRUSTED = 2.0
"""How many drafts that came true a request has to its credit before its first, and half as many that did not."""
OF_OTHERS = 3.0
"""As how many drafts of its own the record of all requests counts: a bad start alone does not shut one out."""
MEMORY, MEMORY_OF_ALL = 0.9, 0.98
"""What is left of a request's record with each further row of its drafts, and of that of all with a row of anybody."""
FORGIVENESS = 0.995
"""What is left of records with each step: in time a failed drafter gets another chance. Of requests whose drafts ranks
make, with each step in which they make some: else it is better to give up."""
WORTH_WAITING = 0.1
"""How many drafts have to come true, to each row of a step, for all rows to wait for them."""
PATIENCE = 8
"""Steps in a row for which ranks make no drafts before they leave off taking steps in, which is to give up on them."""


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
    """Drafts that came true, and those that did not. `given_up`: ranks have missed tokens of this request."""

    right: float = TRUSTED
    wrong: float = TRUSTED / 2
    given_up: bool = False

    @property
    def share(self) -> float:
        return self.right / (self.right + self.wrong)

    def chance(self, usual: float) -> float:
        """Of the next draft, where this share of all come true."""
        return 0.0 if self.given_up else (self.right + OF_OTHERS * usual) / (self.right + self.wrong + OF_OTHERS)

    def add(self, drafted: int, accepted: int, memory: float) -> None:
        self.right = memory * self.right + accepted
        self.wrong = memory * self.wrong + (accepted < drafted)

    def fade(self) -> None:
        self.right = TRUSTED + (self.right - TRUSTED) * FORGIVENESS
        self.wrong = TRUSTED / 2 + (self.wrong - TRUSTED / 2) * FORGIVENESS


class Speculation:
    """Drafts for requests whose tokens are all known, as long as what they bring is worth the longer step.

    Of all drafts, the likeliest first, a step has as many as bring the most tokens in its time, by a curve through the
    steps of late; and any at all, if trials do not speak against them. With `drafts_stay` the ranks keep drafts they
    make for the next step, and the engine does not wait for them.
    """

    def __init__(self, drafter: Drafter, most: int, drafts_stay: bool = False) -> None:
        self.most, self.drafts_stay = most, drafts_stay
        self.by_ranks = isinstance(drafter, RankDrafter)
        self.coming = 0
        """Drafts that ranks make with the last step that was planned."""
        self._without = 0
        """Steps since ranks made some."""
        self._draft_s: float | None = None
        """What a draft takes, by the shorter one of every two in a row: one may have waited for a graph."""
        self._last_draft_s: float | None = None
        self.totals = SpeculationTotals(by_position=[0] * most)
        self.trials = Trials()
        self._drafter = drafter
        self._curve = StepCurve()
        self._records: dict[int, _Record] = {}
        self._of_all = _Record()

    def propose(self, requests: Sequence[Request], rows: int, room: int) -> dict[int, list[int]]:
        """Drafts by request, in a step of so many rows that has room for as many tokens more."""
        if room <= 0 or self._wants_plain(rows):
            return {}
        least = self._least(rows)
        proposed = {
            request.id: (chance, drafts)
            for chance, request in zip(self._chances(requests), requests, strict=True)
            if chance > least and (drafts := self._drafter.propose(request, self.most))
        }
        worths = sorted(
            (-(chance**place), id) for id, (chance, drafts) in proposed.items() for place in range(1, 1 + len(drafts))
        )
        made, time = float(rows), 1.0
        best, best_pace = 0, made
        for number, (worth, _) in enumerate(worths[:room]):
            made, time = made - worth, time * (1 + self._share_of_one_more(rows + number))
            if made / time > best_pace:
                best, best_pace = number + 1, made / time
        counts = Counter(id for _, id in worths[:best])
        return {id: proposed[id][1][:count] for id, count in counts.items()}

    def _least(self, rows: int) -> float:
        """The chance below which no draft is looked for: on its own it would not be worth its time. Those that ranks
        make are there already.
        """
        return 0.0 if self.by_ranks else rows * self._share_of_one_more(rows)

    def is_worth_waiting(self, requests: Sequence[Request], rows: int) -> bool:
        """Whether the tokens on their way to these are better read before the next ones, in a step of so many rows:
        drafts may follow them, and enough of those may come true.
        """
        if not requests or (self.by_ranks and not self.coming) or self._wants_plain(rows):
            return False
        least = self._least(rows)
        chances = zip(self._chances(requests), requests, strict=True)
        hope = sum(chance for chance, request in chances if chance > least and self._drafter.may_follow(request))
        return hope > WORTH_WAITING * rows

    def look_ahead(self, agenda: Agenda) -> None:
        """How many drafts ranks make with this step, and whether they take it in.

        Whoever is in a step that they do not take in is given up for good: what would be guessed behind tokens that
        were missed is not worth much. A prompt is always taken in. Which drafts are made need not be known to plan the
        step that takes them, unless a grammar has a say.
        """
        if not self.by_ranks:
            return
        decoding = agenda.decoding
        agenda.ahead = self.coming = self.ahead(decoding)
        self._without = 0 if self.coming else self._without + bool(decoding)
        agenda.drafts_stay = self.drafts_stay and self.coming > 0 and not any(request.matcher for request in decoding)
        agenda.taken_in = self._without < PATIENCE or bool(agenda.prompts)
        if not agenda.taken_in:
            for request in decoding:
                self._record(request).given_up = True

    def ahead(self, requests: Sequence[Request]) -> int:
        """How many drafts the ranks make of each of these with the next step: as many as bring the most tokens in the
        time that they take there and that of the longer rows behind it.
        """
        if not requests or self._wants_plain(len(requests)):
            return 0
        chances = self._chances(requests)
        rows, longer, alone = len(chances), sum(chance > 0 for chance in chances), self._curve.of(len(chances))
        each = self._draft_s / alone if self._draft_s and alone else CHEAP
        made, time, worth = float(rows), 1.0, chances
        best, best_pace = 0, made
        for number in range(1, self.most + 1):
            added = longer * self._share_of_one_more(rows + longer * (2 * number - 1) // 2)
            made, time = made + sum(worth), time * (1 + added / 2) / (1 - added / 2)
            if made / (time + number * each) > best_pace:
                best, best_pace = number, made / (time + number * each)
            worth = [before * chance for before, chance in zip(worth, chances, strict=True)]
        return best

    def came(self, requests: Sequence[Request], drafts: Sequence[list[int]]) -> None:
        """Drafts that ranks have made of these requests, or none."""
        if self.by_ranks:
            for number, request in enumerate(requests):
                request.drafts = drafts[number] if drafts else []

    def stayed(self, requests: Sequence[Request], ahead: int) -> None:
        """Ranks have made so many drafts of each of these requests, as far as there was room behind the token of this
        step, which is not booked yet, and have not told them.
        """
        for request in requests:
            request.drafts = [UNREAD] * min(ahead, request.room - len(request.tokens) - 1)

    def right(self, drafts: Sequence[int], drawn: Sequence[int]) -> int:
        """How many of a row's drafts stand: those before the first that is not the token drawn in its place."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, drawn, strict=False)))

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        totals = self.totals
        self._record(request).add(drafted, accepted, MEMORY)
        self._of_all.add(drafted, accepted, MEMORY_OF_ALL)
        totals.drafts += 1
        totals.draft_tokens += drafted
        totals.accepted_tokens += accepted
        for position in range(accepted):
            totals.by_position[position] += 1

    def observe(self, tokens: int, seconds: float, ahead: int = 0, each: float = 0.0) -> None:
        """What a step without prompts took. Ranks make so many drafts of every row with it, and one takes them `each`
        beside such a step.
        """
        self._curve.observe(tokens, seconds)
        if each:
            last, self._last_draft_s = self._last_draft_s, each
            if last is not None:
                shorter = min(each, last)
                before = shorter if self._draft_s is None else self._draft_s
                self._draft_s = STEP_MEMORY * before + (1 - STEP_MEMORY) * shorter
        self._of_all.fade()
        if ahead or not self.by_ranks:
            for record in self._records.values():
                record.fade()

    def forget(self, request: Request) -> None:
        self._records.pop(request.id, None)
        self._drafter.forget(request)

    def _wants_plain(self, rows: int) -> bool:
        return self.trials.wants_plain(rows)

    def _share_of_one_more(self, tokens: int) -> float:
        """What one token more takes, to a step of so many."""
        return self._curve.share_of_one_more(tokens)

    def _chances(self, requests: Sequence[Request]) -> list[float]:
        """That the next draft of each comes true, by its own record and that of all."""
        usual = self._of_all.share
        return [self._record(request).chance(usual) for request in requests]

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request.id)
        if record is None:
            record = self._records[request.id] = _Record()
        return record
