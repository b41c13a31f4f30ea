"""The step filler: whose tokens run in the next step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby, islice
from operator import attrgetter

from phalanx.engine.agenda import Agenda
from phalanx.engine.caches import Caches
from phalanx.engine.drafting import Drafting
from phalanx.engine.passing import Passing
from phalanx.engine.request import Phase, Request
from phalanx.engine.roster import Roster
from phalanx.engine.sharing import Sharing, charge
from phalanx.engine.speculation import Speculation
from phalanx.engine.step_plan import Admission

_order = attrgetter("order")
_computed = attrgetter("computed")
_slot = attrgetter("slot")


class StepFiller(Roster):
    """First come, first served by priority, in one token budget.

    Requests that decode go first, one token each, and the longest of them lead the step, so that a GPU does not end on
    a long one. Prompts share what is left, in order: first those that have begun, in chunks, then waiting ones are
    admitted while slots, tokens and blocks last. A prompt too long for one step leaves a part of each to shorter ones,
    which pass the long ones that wait. An admitted request gets all blocks of its prompt at once, in windows those of
    its next chunk, and leaves some to the others, see `kept_free`. When one that decodes needs a block and none is
    left, the last in order of all that run gives up its blocks and its slot and waits to be computed again (preemption
    by recompute). A prompt whose windows have no block left waits for those before it, and drives out those behind it.

    Requests may have owners. Then each owner has a part of every step (`engine.sharing`), in which its own requests are
    served as above, those that decode in turn; the owner that holds least is admitted first; and where there is no slot
    or too few blocks for it, the one that holds most gives up its youngest.
    """

    def __init__(self, caches: Caches, slots: int, budget: int, speculation: Speculation | None) -> None:
        super().__init__(caches, slots)
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._budget = budget
        self._passing: defaultdict[str, Passing] = defaultdict(Passing)
        self._slots = slots
        self.speculation = speculation
        self._sharing = Sharing(self, slots, budget, speculation.most if speculation else 0)

    @property
    def speculation(self) -> Speculation | None:
        return self._drafting.speculation if self._drafting else None

    @speculation.setter
    def speculation(self, speculation: Speculation | None) -> None:
        self._drafting = Drafting(self, speculation, self._slots) if speculation else None

    def _fill(self, agenda: Agenda) -> None:
        self._sharing.make_way()
        left = self._sharing.parts()
        preempted = self._decode(agenda, left)
        for owner in left:
            self._continue_prompts(agenda, left, owner, may_admit=not preempted)
        if not preempted:
            self._admit(agenda, left, self._sharing.next_ones(left))

    def _decode(self, agenda: Agenda, left: dict[str, int]) -> bool:
        """One token for each that is ready. True if some had to give up their blocks for it."""
        if not (self.ready or self.prompts):
            return False
        due = [request for request in self.ready.values() if request.computed == request.room]
        for request in due:
            if request.room == request.longest - 1:
                del self.ready[request.id]
        rows, in_need = list(self.ready.values()), [request for request in due if request.id in self.ready]
        if self._drafting is not None:
            rows = self._drafting.without_waiting(rows)
        most = self._sharing.for_decodes(left)
        rows = self._sharing.in_turn(rows, most)
        if len(rows) < len(self.ready):
            chosen = {request.id for request in rows}
            in_need = [request for request in in_need if request.id in chosen]
        preemptions = self.preemptions
        for request in in_need:
            self.caches.trim(request)
        in_need = self._make_room(in_need, left)
        if self.preemptions > preemptions:
            rows = [request for request in rows if request.phase is Phase.RUNNING]
        for request in in_need:
            agenda.give(_slot(request), self.caches.grow(request))
        if self._drafting is not None and rows:
            rows = self._drafting.draft(agenda, rows, most, self._budget)
        charge(left, rows, agenda.drafted)
        rows.sort(key=_computed, reverse=True)
        agenda.decodes, agenda.starts = rows, list(map(_computed, rows))
        for request in rows:
            request.computed += 1
            if request.matcher is not None:
                agenda.constrained = True
                del self.ready[request.id]
        if self.caches.takes_snapshots:
            for request in rows:
                self._save(agenda, request)
        return self.preemptions > preemptions

    def _make_room(self, in_need: list[Request], left: dict[str, int]) -> list[Request]:
        """Who gets another block of every group that it lacks: these and prompts without room in their windows, as far
        as the last in order have not had to give up theirs for it.
        """
        has, lacking = self.caches.has, self.caches.lacking
        while not has(lacking(in_need)):
            self.preempt(self._sharing.least_due())
            in_need = [request for request in in_need if request.phase is Phase.RUNNING]
        if not self.caches.layout.windows:
            return in_need
        stuck = (each for each in self.prompts.values() if each.computed == each.room and left.get(each.owner))
        for prompt in sorted(stuck, key=_order):
            while prompt.phase is Phase.RUNNING and not has(lacking([*in_need, prompt])):
                victim = self._sharing.least_due()
                if victim is prompt:
                    break
                self.preempt(victim)
                in_need = [request for request in in_need if request.phase is Phase.RUNNING]
            else:
                in_need += [prompt] if prompt.phase is Phase.RUNNING else []
        return in_need

    def _save(self, agenda: Agenda, request: Request) -> None:
        place = self.caches.save(request)
        if place is not None:
            agenda.saved.append((_slot(request), place))

    def _continue_prompts(self, agenda: Agenda, left: dict[str, int], owner: str, may_admit: bool) -> None:
        """Chunks for the prompts of an owner that have begun, and for those that pass a long one."""
        prompts = sorted((each for each in self.prompts.values() if each.owner == owner), key=_order)
        if prompts and self._is_long(prompts[0]):
            first, budget = prompts[0], left[owner]
            part = {owner: self._passing[owner].part(first.id, first.rest, budget)}
            at_first = part[owner]
            for request in prompts[1:]:
                if not self._is_long(request):
                    part[owner] -= self._compute(agenda, request, part[owner])
            if may_admit and part[owner]:
                self._admit(agenda, part, self._shorter(owner))
            taken = at_first - part[owner]
            self._passing[owner].took(taken)
            left[owner] -= taken
            prompts = [first]
        for request in prompts:
            left[owner] -= self._compute(agenda, request, left[owner])

    def _is_long(self, request: Request) -> bool:
        """Whether one step cannot hold all of a prompt that is not in the cache."""
        most = self._budget
        if request.rest > most and request.phase is Phase.WAITING:
            return request.rest - self.caches.found(request) > most
        return request.rest > most

    def _shorter(self, owner: str) -> list[Request]:
        """Waiting requests of an owner that one step could hold, as far as none of a better priority waits."""
        if not self.free_slots:
            return []
        own = (request for request in self.waiting if request.owner == owner)
        _, alike = next(groupby(own, key=lambda request: request.params.priority), (0, iter(())))
        return list(islice((each for each in alike if not self._is_long(each)), len(self.free_slots)))

    def _admit(self, agenda: Agenda, left: dict[str, int], candidates: Iterable[Request]) -> None:
        """Let requests in until one has to wait, and take what they compute from what their owners have left."""
        for request in candidates if any(left.values()) else ():
            most = left[request.owner]
            if not most or not self.free_slots or request.pending:
                break
            if not self._take_blocks(request, most):
                break
            self._seat(agenda, request)
            left[request.owner] -= self._compute(agenda, request, most)

    def _take_blocks(self, request: Request, most: int) -> bool:
        """For its prompt and its next chunk. Who is alone begins with a token, if there are blocks for no more."""
        taken = self.caches.take(request, self.kept_free(request), most)
        return taken or (not self.running and self.caches.take(request, 0, 1))

    def _seat(self, agenda: Agenda, request: Request) -> None:
        """It enters the batch, and the ranks are told what they have to know of it."""
        slot = self._enter_batch(request)
        if request.cached_tokens is None:
            request.cached_tokens, request.queued_s = request.computed, time.monotonic() - request.arrived
            self.prefix_queries += len(request.tokens)
            self.prefix_hits += request.computed
        agenda.admissions.append(
            Admission(slot, request.prompt_length, list(request.tokens), request.seed, request.params, request.adapter)
        )
        agenda.give(slot, [list(request.blocks), *request.windows])
        if request.restored is not None:
            agenda.restored.append((request.restored, slot))

    def _compute(self, agenda: Agenda, request: Request, most: int) -> int:
        """A chunk of a prompt. Where only one token is left, or only the next one to sample, it is ready to decode."""
        count = min(request.rest, most)
        if request.computed + count > request.room:
            agenda.give(_slot(request), self.caches.extend(request, count))
            count = min(count, request.room - request.computed)
        if not count:
            return 0
        snapshot = bool(request.snapshot_ends) and request.snapshot_ends[0] - request.computed <= count
        if snapshot:
            count = request.snapshot_ends.pop(0) - request.computed
        agenda.prompts.append((request, request.computed, count))
        agenda.constrained |= request.matcher is not None
        request.computed += count
        self.caches.register(request)
        if snapshot:
            self._save(agenda, request)
        if request.rest > 1:
            self.prompts[request.id] = request
            return count
        self.prompts.pop(request.id, None)
        if request.rest == 1 or request.matcher is None:
            self.ready[request.id] = request
        return count
