"""Rows of drafts: tokens that were guessed, computed behind those that are known, and what stands of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter

from phalanx.engine.agenda import Agenda, Drafted, Launched
from phalanx.engine.logprobs import TokenLogprobs
from phalanx.engine.request import Phase, Request
from phalanx.engine.roster import Roster
from phalanx.engine.speculation import WORTH_WAITING, Speculation
from phalanx.engine.step_plan import UNREAD, StepResult, StepTimes

_slot = attrgetter("slot")


def _seconds(times: StepTimes) -> float:
    return times.wall or times.total


class Drafting:
    """Gives drafts to rows of a step, and books which of them came true."""

    def __init__(self, roster: Roster, speculation: Speculation, most_rows: int) -> None:
        self.speculation = speculation
        self._roster = roster
        self._most_rows = most_rows
        self._stayed = 0
        """Drafts of each row that the step before left with the ranks."""

    def observe(self, launched: Launched, result: StepResult) -> None:
        """What the step took, and the drafts that came with it. Where they stay, their time is that of those before."""
        plan, times = launched.plan, result.times
        seconds, counts = _seconds(times) - times.draft, launched.decodes and times.steady
        timed, self._stayed = (self._stayed, plan.ahead) if plan.drafts_stay else (plan.ahead, 0)
        if counts:
            self.speculation.observe(plan.num_tokens, seconds, plan.ahead, times.draft / timed if timed else 0.0)
        if not launched.drafted and (rows := plan.counts.count(1)):
            self.speculation.trials.without_drafts(rows, seconds if counts else None)
        if plan.drafts_stay:
            self.speculation.stayed(launched.sampled, plan.ahead)
        else:
            self.speculation.came(launched.sampled, result.drafts)

    def without_waiting(self, rows: list[Request]) -> list[Request]:
        """All rows, or none where drafts are worth waiting for tokens that are on their way, or others have to wait for
        what comes of theirs.

        All wait or none: two halves of a batch that take turns would take twice as many steps.
        """
        pending = [request for request in rows if request.pending]
        if self._unread > WORTH_WAITING * len(rows) or self.speculation.is_worth_waiting(pending, len(rows)):
            return []
        return rows

    @property
    def _unread(self) -> int:
        """Requests whose drafts are on their way: they go on when it is read which came true."""
        ready = self._roster.ready
        return sum(
            request.pending > 0
            and request.id not in ready
            and not request.matcher
            and request.computed < request.longest - 1
            for request in self._roster.running
        )

    def draft(self, agenda: Agenda, rows: list[Request], most: Mapping[str, int], budget: int) -> list[Request]:
        """Give drafts to some of these rows. Returns those that compute one token.

        `most` tokens are for each owner, `budget` for all. With drafts there are no more tokens than requests may run:
        so many fit a graph. Who has tokens to compute again goes first, even if they are more than its owner's part. A
        row that is then too many waits a step.
        """
        rows.sort(key=lambda request: not request.rewound)
        due: Counter[str] = Counter()
        for request in rows:
            due[request.owner] += request.rest
        spare = {owner: most[owner] - tokens for owner, tokens in due.items()}
        room = min(budget, self._most_rows) - due.total()
        known = [request for request in rows if not request.pending]
        proposed = self.speculation.propose(known, len(rows), room)
        taken: Counter[str] = Counter()
        left, plain = budget, []
        for request in rows:
            owner, count = request.owner, request.rest
            if (taken[owner] and taken[owner] + count > most[owner]) or count > left:
                continue
            drafts = self._that_fit(agenda, request, proposed.get(request.id, [])[: max(0, spare[owner])])
            masks: list[bytes] = []
            if request.matcher is not None and (drafts or count > 1):
                masks = request.matcher.masks(drafts)
                drafts = drafts[: len(masks) - 1]
            spare[owner] -= len(drafts)
            taken[owner] += count + len(drafts)
            left -= count + len(drafts)
            if drafts or count > 1:
                self._compute(agenda, request, drafts, masks)
                continue
            plain.append(request)
            if request.untold:
                self._tell(agenda, request, [])
        return plain

    def proven(self, launched: Launched, result: StepResult) -> Iterator[tuple[Request, int, TokenLogprobs | None]]:
        """The tokens of a step that stand: of a row of drafts those that came true, and the one behind them. Each is
        booked before the next one is asked for.
        """
        drafted = {row.request.id: row for row in launched.drafted}
        tokens, logprobs, held = iter(result.tokens), iter(result.logprobs), iter(result.drafted)
        proven = 0
        for request in launched.sampled:
            row = drafted.get(request.id)
            count = 1 + len(row.drafts) if row else 1
            found = list(islice(zip(tokens, logprobs, strict=True), count))
            accepted = 0
            if row is not None:
                if result.drafted:
                    row.drafts[:] = islice(held, len(row.drafts))
                accepted = self.speculation.right(row.drafts, [token for token, _ in found])
                self._settle(row, accepted)
                found = found[: 1 + accepted]
            proven += len(found)
            for number, (token, told) in enumerate(found):
                if number < accepted and request.phase is not Phase.FINISHED:
                    request.drafted = (request.drafted[0] + 1, request.drafted[1] - 1)
                yield request, token, told
        if launched.decodes and result.times.steady:
            self.speculation.trials.with_drafts(len(launched.plan.slots), proven, _seconds(result.times))

    def _settle(self, row: Drafted, accepted: int) -> None:
        """Take back what was computed behind the last draft that came true. A state with a twin is taken back as a
        whole. A draft counts as rejected until its token is in the answer.
        """
        request, rejected = row.request, len(row.drafts) - accepted
        request.pending -= rejected
        request.drafted = (request.drafted[0], request.drafted[1] + len(row.drafts))
        if request.phase is Phase.FINISHED:
            return
        self.speculation.verified(request, len(row.drafts), accepted)
        if request.phase is Phase.RUNNING:
            request.untold = True
            request.rewound = bool(self._roster.caches.layout.twins) and rejected > 0
            request.computed = row.start if request.rewound else request.computed - rejected
            self._roster.ready[request.id] = request

    def _that_fit(self, agenda: Agenda, request: Request, drafts: list[int]) -> list[int]:
        """As many as there are blocks for, with one more if it is to be had, and as many as the answer may have.

        Ranks that make drafts need room for those of the next step too, and for the token before them.
        """
        ahead = self.speculation.most + 1 if self.speculation.by_ranks else 0
        more = len(drafts) + ahead
        if more and request.length + more > request.room < request.longest - 1:
            roster, caches = self._roster, self._roster.caches
            caches.trim(request)
            has_grown = request.slot in agenda.blocks
            if not has_grown and caches.has(caches.lacking([request]), roster.kept_free(request)):
                agenda.give(_slot(request), caches.grow(request))
        return drafts[: max(0, request.room - request.length)]

    def _compute(self, agenda: Agenda, request: Request, drafts: list[int], masks: Sequence[bytes]) -> None:
        """A row of all tokens that are to be computed, and drafts. It is read before the request goes on."""
        agenda.constrained |= request.matcher is not None
        slot, start, layout = _slot(request), request.computed, self._roster.caches.layout
        if layout.twins:
            twin = layout.twins[slot]
            agenda.restored.append((twin, slot) if request.rewound else (slot, twin))
        self._tell(agenda, request, drafts)
        count = request.rest + len(drafts)
        request.computed += count
        del self._roster.ready[request.id]
        agenda.drafted.append(Drafted(request, start, count, drafts, masks))

    def _tell(self, agenda: Agenda, request: Request, drafts: list[int]) -> None:
        """Rows of drafts leave it open which token was the last one: the next row is told."""
        stayed = UNREAD in drafts
        agenda.reread |= stayed
        known = request.tokens[request.computed :] + ([] if stayed else drafts)
        agenda.told.append((_slot(request), request.computed, known))
        request.untold = False
