"""Sharing: requests of several owners have equal parts of the engine, however many each of them sends."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter

from phalanx.engine.agenda import Drafted
from phalanx.engine.request import Need, Request
from phalanx.engine.roster import Roster
from phalanx.engine.step_line import CostLine, StepLine

LONGEST_STEP_S = 0.1
"""Steps of a shared engine end within this time where they can: a newcomer waits for the one that runs."""
SOON_S, SHORT_STEP_S = 1.0, 0.025
"""Whoever has left so lately may be back in a moment: steps without it end within the second of these times."""
ADDED = 0.5
"""What each other owner may add to a step, in parts of what it would take for one alone. The rest up to a whole one, at
which one would have half its speed beside another, is for what is done between steps."""
FEW = 8
"""As many tokens of a step the owner that needs least has whole, where others may add fewer."""
FOR_PROMPTS = 4
"""One part in this many of an owner's tokens is for its prompts, where it has both these and answers."""
_OUTLIER = 2.0
_SMALL, _NEW = 16, 0.1
"""Steps of up to so many tokens are remembered by their size, the last one with that weight."""

_order = attrgetter("order")
_owner = attrgetter("owner")


class StepPace:
    """What steps take, learned from those that ran: small ones by their size, others by a line through all. One that
    took far longer than the line says counts as no more than twice that: something else had the processor.
    """

    def __init__(self) -> None:
        self._steps = StepLine()
        self._line: CostLine | None = None
        self._small: dict[int, float] = {}
        self.clock = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        self.clock += seconds
        if self._line is not None:
            seconds = min(seconds, _OUTLIER * self._line.of(tokens))
        if seconds <= 0:
            return
        self._steps.observe(tokens, seconds)
        if tokens <= _SMALL:
            known = self._small.get(tokens, seconds)
            self._small[tokens] = known + _NEW * (seconds - known)
        line = self._steps.fit()
        if line is not None:
            self._line = CostLine(max(0.0, line.per_step), max(0.0, line.per_token))

    def in_time(self, longest: float = LONGEST_STEP_S) -> float:
        """Tokens that a step can have to end within that time, or for them to take half of it."""
        if self._line is None or not self._line.per_token:
            return float("inf")
        per_step, per_token = self._line
        return max(longest - per_step, per_step) / per_token

    def beside(self, tokens: int) -> float:
        """Tokens that each other owner may add to a step of so many."""
        if self._line is None or not self._line.per_token:
            return float("inf")
        room = ADDED * self._seconds(tokens)
        for size in range(tokens, max(tokens, _SMALL)):
            more = self._seconds(size + 1) - self._seconds(size)
            if more > room:
                return size - tokens + room / more
            room -= max(0.0, more)
        return max(0, _SMALL - tokens) + room / self._line.per_token

    def _seconds(self, tokens: int) -> float:
        assert self._line is not None
        return self._small.get(tokens) or self._line.of(tokens)


def parts_of(wanted: Mapping[str, int], total: int) -> dict[str, int]:
    """Tokens for each owner: the same number for all, but for those that want fewer. Each has one at least."""
    left, most = total, 1
    for number, count in enumerate(sorted(wanted.values())):
        most = max(1, left // (len(wanted) - number))
        if count > most:
            break
        left -= count
    return {owner: min(count, most) for owner, count in wanted.items()}


class Holdings:
    """What owners have of the batch: of its slots or of its blocks, whichever is the larger part."""

    def __init__(self, running: Iterable[Request], slots: int, blocks: int) -> None:
        self._all_slots, self._all_blocks = slots, blocks
        self._slots: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        self._slots[request.owner] += 1
        self._blocks[request.owner] += len(request.blocks)

    def part(self, owner: str, more_slots: int = 0, more_blocks: int = 0) -> float:
        slots, blocks = self._slots[owner] + more_slots, self._blocks[owner] + more_blocks
        return max(slots / self._all_slots, blocks / self._all_blocks)

    def greediest(self) -> str:
        return max(self._slots, key=self.part)


class Sharing:
    """Which owner has how much of each step, who of them is admitted next, and who has to make way.

    An engine whose requests have no owner, "", is not shared: they have everything, in order. One with a single other
    owner only keeps its steps short.
    """

    def __init__(self, roster: Roster, slots: int, budget: int, drafts: int) -> None:
        self.pace = StepPace()
        self._roster = roster
        self._slots, self._budget, self._drafts = slots, budget, drafts
        self._turn = 0
        self._kept = 0.0
        self._shared_at = -SOON_S

    @property
    def is_shared(self) -> bool:
        return len(self._roster.owners) > 1

    def parts(self) -> dict[str, int]:
        """Tokens of the next step for each owner that has something to compute."""
        owners = self._roster.owners
        if len(owners) > 1:
            self._shared_at = self.pace.clock
            return self._parts()
        is_lately = self.pace.clock - self._shared_at < SOON_S
        in_time = int(min(self._budget, max(1, self.pace.in_time(SHORT_STEP_S if is_lately else LONGEST_STEP_S))))
        return {owner: in_time if owner else self._budget for owner in owners}

    def _parts(self) -> dict[str, int]:
        roster = self._roster
        needed, wanted = Counter[str](), Counter[str]()
        for request in roster.ready.values():
            needed[request.owner] += request.rest
            wanted[request.owner] += request.rest + self._drafts
        for request in (*roster.prompts.values(), *roster.waiting):
            needed[request.owner] += request.rest
            wanted[request.owner] += request.rest
        if len(needed) > self._budget:
            needed = Counter({owner: needed[owner] for owner in self._whose_turn(needed, self._budget)})
        return self._divided(needed, {owner: wanted[owner] for owner in needed}) if needed else {}

    def _divided(self, needed: Mapping[str, int], wanted: dict[str, int]) -> dict[str, int]:
        """The same for all, of as many tokens as others may add to those of the one that needs least.

        If those are few, it has them whole, and whoever wants more shares what may be added: each a token every few
        steps where that is less than one.
        """
        least = min(needed, key=needed.__getitem__)
        own, beside = wanted[least], self.pace.beside(needed[least])
        total = own + sum(beside for owner in wanted if owner != least)
        limit = int(min(self._budget, max(self.pace.in_time(), len(wanted))))
        heavy = {owner: count for owner, count in wanted.items() if count > own}
        if total >= limit or own > FEW or not heavy:
            return parts_of(wanted, max(int(min(total, limit)), len(wanted)))
        self._kept = min(self._kept, 1.0) + beside * len(heavy)
        chosen = self._whose_turn(heavy, int(self._kept))
        parts = parts_of({owner: heavy[owner] for owner in chosen}, int(self._kept))
        self._kept -= sum(parts.values())
        return {owner: count for owner, count in wanted.items() if count <= own} | parts

    def _whose_turn(self, owners: Iterable[str], count: int) -> list[str]:
        """So many of them, others with each turn."""
        ordered = sorted(owners)
        self._turn += count
        return [ordered[(self._turn + index) % len(ordered)] for index in range(min(count, len(ordered)))]

    def for_decodes(self, left: Mapping[str, int]) -> Mapping[str, int]:
        """What answers may take of it, so that an owner's own answers do not keep its prompts out."""
        roster = self._roster
        if not self.is_shared and "" in left:
            return left
        waiting = roster.waiting if roster.free_slots else ()
        beside = {request.owner for request in (*roster.prompts.values(), *waiting)}
        return {
            owner: part - max(part // FOR_PROMPTS, 1) if part > 1 and owner in beside else part
            for owner, part in left.items()
        }

    def in_turn(self, rows: list[Request], most: Mapping[str, int]) -> list[Request]:
        """As many rows of each owner as it may have, others with each step; in order where there are no owners."""
        if not self.is_shared and len(rows) <= next(iter(most.values()), 0):
            return rows
        if not self.is_shared and "" in most:
            return heapq.nsmallest(most[""], rows, key=_order)
        taken, chosen = Counter[str](), []
        for request in rows:
            if taken[request.owner] < most.get(request.owner, 0):
                taken[request.owner] += 1
                chosen.append(request)
        ready = self._roster.ready
        for request in chosen:
            ready[request.id] = ready.pop(request.id)
        return chosen

    def make_way(self) -> None:
        """For the next one to be admitted, by those who hold at least twice what its owner would with it.

        Twice, so that two do not drive each other out in turn.
        """
        roster = self._roster
        if not self.is_shared or not roster.waiting:
            return
        request = next(self._of_those_who_hold_least(dict.fromkeys(roster.owners, 1)), None)
        if request is None:
            return
        blocks = roster.pool.blocks_for(len(request.tokens))
        chunk = min(blocks, roster.pool.blocks_for(self._budget))
        needed = Need(blocks, len(roster.caches.layout.windows) * chunk)
        part = self._holdings(roster.running).part(request.owner, 1, blocks)
        while roster.running and not (roster.free_slots and roster.caches.has(needed, roster.kept_free(request))):
            victim, held = self._least_due_and_held()
            if held < 2 * part:
                return
            roster.preempt(victim)

    def least_due(self) -> Request:
        """Who gives up its blocks when there are too few: the last in order, of the greediest owner."""
        return self._least_due_and_held()[0] if self.is_shared else self._roster.running[-1]

    def _least_due_and_held(self) -> tuple[Request, float]:
        """Never the oldest of all, unless it is alone: so some request comes to its end."""
        running = self._roster.running
        oldest = min(running, key=lambda request: request.id)
        others = [request for request in running if request is not oldest]
        holdings = self._holdings(others)
        owner = holdings.greediest() if others else oldest.owner
        youngest = next(request for request in reversed(others or [oldest]) if request.owner == owner)
        return youngest, holdings.part(owner)

    def next_ones(self, left: Mapping[str, int]) -> Iterable[Request]:
        """Those to admit, in order. Where there are owners: the first one of whom holds least, and has tokens left."""
        if not self.is_shared:
            return list(islice(self._roster.waiting, len(self._roster.free_slots)))
        return self._of_those_who_hold_least(left)

    def _of_those_who_hold_least(self, left: Mapping[str, int]) -> Iterator[Request]:
        lines: dict[str, deque[Request]] = {}
        for request in self._roster.waiting:
            lines.setdefault(request.owner, deque()).append(request)
        holdings = self._holdings(self._roster.running)
        while lines:
            owner = min(lines, key=holdings.part)
            request = lines[owner].popleft()
            if not left.get(owner) or request.pending:
                del lines[owner]
                continue
            yield request
            holdings.add(request)
            if not lines[owner]:
                del lines[owner]

    def _holdings(self, of: Iterable[Request]) -> Holdings:
        caches = self._roster.caches
        return Holdings(of, self._slots, caches.layout.token_blocks or caches.blocks_of_group)


def charge(left: dict[str, int], rows: list[Request], drafted: Iterable[Drafted]) -> None:
    """Take what rows compute from their owners' parts. What one of them overdraws, the others lack."""
    of_owners = Counter(map(_owner, rows)) if len(left) > 1 else dict.fromkeys(left, len(rows))
    for owner, tokens in of_owners.items():
        left[owner] -= tokens
    for row in drafted:
        left[row.request.owner] -= row.tokens
    debt = -sum(tokens for tokens in left.values() if tokens < 0)
    for owner in sorted(left, key=left.__getitem__, reverse=True) if debt else ():
        paid = min(debt, max(0, left[owner]))
        left[owner], debt = max(0, left[owner]) - paid, debt - paid
