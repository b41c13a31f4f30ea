"""The scheduler: which tokens of which requests run in the next step."""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import attrgetter
from typing import NamedTuple

from phalanx.engine.agenda import Agenda, Drafted
from phalanx.engine.blocks import BlockPool
from phalanx.engine.caches import CacheLayout, Caches
from phalanx.engine.logprobs import TokenLogprobs
from phalanx.engine.masks import MaskBook, places_for
from phalanx.engine.output import NO_TOKEN, Output
from phalanx.engine.passing import Passing
from phalanx.engine.reports import Reports
from phalanx.engine.request import Phase, Request
from phalanx.engine.speculation import Speculation
from phalanx.engine.step_plan import Admission, StepPlan, StepResult
from phalanx.errors import ConfigError, RequestError

KEPT_FREE = 0.02
"""The least share of all blocks that admissions leave to running requests to grow into."""

_order = attrgetter("order")
_computed = attrgetter("computed")
_slot = attrgetter("slot")


def kept_free(num_blocks: int, running: int, again: bool) -> int:
    """Blocks that an admission leaves to those that run: for every second one a block to grow into.

    A request that has been preempted leaves one to each, itself included. So it does not come back into the shortage
    that it fell victim to: for as long as a block lasts, nobody needs to take what it holds.
    """
    return max(int(KEPT_FREE * num_blocks), running + 1 if again else running // 2)


@dataclass(frozen=True)
class Limits:
    """What one step and the whole batch may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class _Launched(NamedTuple):
    """A step on its way, the requests of its rows that yield tokens, and its rows of drafts."""

    plan: StepPlan
    sampled: list[Request]
    drafted: list[Drafted]


class Scheduler:
    """First come, first served by priority, in one token budget.

    Requests that decode go first, one token each, and the longest of them lead the step, so that a GPU does not end on
    a long one. Prompts share what is left, in order: first those that have begun, in chunks, then waiting ones are
    admitted while slots, tokens and blocks last. A prompt too long for one step leaves a part of each to shorter ones,
    which pass the long ones that wait. An admitted request gets all blocks of its prompt at once and leaves some to the
    others, see `kept_free`. When one that decodes needs a block and none is left, the last in order of all that run
    gives up its blocks and its slot and waits to be computed again (preemption by recompute).

    A request that runs is a prompt (more than one token to compute), or ready (exactly one), or can only be read: all
    its tokens are launched, or, under a grammar, the next one depends on one not yet read.
    """

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        eos_token_ids: tuple[int, ...] = (),
        layout: CacheLayout | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        if min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len) < 1:
            raise ConfigError("bad_limits", f"Nothing can run under {limits}.", "Every limit must be at least 1.")
        self.caches = Caches(pool, layout)
        if self.caches.blocks_for(limits.max_model_len) > pool.num_blocks:
            room = pool.num_blocks // self.caches.layout.groups * pool.block_size
            raise ConfigError(
                "kv_too_small",
                f"The KV cache holds {room} tokens, but one sequence may have {limits.max_model_len}.",
                f"Lower max_model_len to {room} or give the KV cache more memory.",
            )
        self.limits = limits
        self.pool = pool
        self.speculation = speculation
        self.eos_token_ids = frozenset(eos_token_ids)
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._ready: dict[int, Request] = {}
        self._prompts: dict[int, Request] = {}
        self._masks = MaskBook(places_for(limits.max_num_seqs))
        self._free_slots = list(range(limits.max_num_seqs))
        self._in_flight: deque[_Launched] = deque()
        self._passing = Passing()
        self._reports = Reports()
        self._step = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, request: Request) -> None:
        params = request.params
        most = self.limits.max_model_len if params.max_tokens is None else request.prompt_length + params.max_tokens
        request.longest = min(self.limits.max_model_len, most)
        request.ends = frozenset() if params.ignore_eos else self.eos_token_ids
        if params.stop_token_ids:
            request.ends = request.ends.union(params.stop_token_ids)
        if params.max_tokens == 0:
            request.longest, request.ends = request.prompt_length + 1, frozenset()
        self._reports.add(request)
        self.requests[request.id] = request
        insort(self.waiting, request, key=_order)

    def cancel(self, request_id: int) -> bool:
        """End a request in whatever phase it is; its blocks are free at once. False if it is not known any more."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "cancelled")
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a launched step is applied."""
        agenda = Agenda()
        self._fill(agenda)
        if not agenda.tokens:
            return None
        self._step += 1
        plan, sampled = agenda.to_plan(self._step, self._masks)
        plan = self._reports.mark(plan)
        for prompt, _, _ in agenda.prompts:
            self.caches.settle(prompt)
        for request in sampled:
            request.pending += 1
        for row in agenda.drafted:
            row.request.pending += len(row.drafts)
        self._in_flight.append(_Launched(plan, sampled, agenda.drafted))
        return plan

    def _fill(self, agenda: Agenda) -> None:
        budget = self.limits.max_num_batched_tokens
        preempted = self._decode(agenda, budget)
        budget -= agenda.tokens
        budget -= self._continue_prompts(agenda, budget, may_admit=not preempted)
        if not preempted:
            self._admit(agenda, budget, self.waiting)

    def apply(self, result: StepResult) -> list[Output]:
        """Book the tokens of the oldest launched step. Requests that ended meanwhile take no part."""
        launched = self._in_flight.popleft()
        assert launched.plan.step == result.step, f"step {result.step} came back, {launched.plan.step} was due"
        booked: Iterable[tuple[Request, int, TokenLogprobs | None]]
        booked = zip(launched.sampled, result.tokens, result.logprobs, strict=not launched.drafted)
        if self.speculation is not None:
            if not launched.plan.admissions and launched.plan.samples == launched.plan.counts:
                self.speculation.observe(launched.plan.num_tokens, result.times.total)
            if launched.drafted:
                booked = self._proven(self.speculation, launched, result)
        outputs = []
        block_size, running, finished = self.pool.block_size, Phase.RUNNING, Phase.FINISHED
        for request, token, logprobs in booked:
            if request.phase is finished:
                continue
            tokens, reason = request.tokens, None
            request.pending -= 1
            if not len(tokens) % block_size and request.phase is running:
                self.caches.register(request)
            tokens.append(token)
            if token in request.ends or len(tokens) >= request.longest or request.matcher is not None:
                reason = self._conclude(request, token)
            outputs.append(Output(request.id, token, logprobs, reason, request.cached_tokens or 0, request.queued_s))
        return self._reports.complete(result, outputs) if self._reports.any_in_flight else outputs

    def _proven(
        self, speculation: Speculation, launched: _Launched, result: StepResult
    ) -> list[tuple[Request, int, TokenLogprobs | None]]:
        """The tokens of a step that stand: of a row of drafts those that came true, and the one behind them."""
        drafted = {row.request.id: row for row in launched.drafted}
        tokens, logprobs = iter(result.tokens), iter(result.logprobs)
        proven: list[tuple[Request, int, TokenLogprobs | None]] = []
        for request in launched.sampled:
            row = drafted.get(request.id)
            count = 1 + len(row.drafts) if row else 1
            found = list(islice(zip(tokens, logprobs, strict=True), count))
            if row is not None:
                pairs = zip(row.drafts, found, strict=False)
                accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1][0], pairs))
                self._settle_drafts(speculation, row, accepted)
                found = found[: 1 + accepted]
            proven += [(request, token, told) for token, told in found]
        return proven

    def _settle_drafts(self, speculation: Speculation, row: Drafted, accepted: int) -> None:
        """Take back what was computed behind the last draft that came true. A state is taken back as a whole."""
        request, rejected = row.request, len(row.drafts) - accepted
        request.pending -= rejected
        if request.phase is Phase.FINISHED:
            return
        speculation.verified(request, len(row.drafts), accepted)
        if request.phase is Phase.RUNNING:
            request.untold = True
            request.rewound = self.caches.layout.states and rejected > 0
            request.computed = row.start if request.rewound else request.computed - rejected
            self._ready[request.id] = request

    def abandon(self, plan: StepPlan, error: RequestError) -> Output:
        """The newest step, `plan`, did not run: its youngest request ends with this error.

        All others are computed again, but for what is cached from before that step: of this one nothing is sure.
        """
        launched = self._in_flight.pop()
        assert launched.plan is plan, f"step {plan.step} did not run, step {launched.plan.step} was the last one"
        for request in launched.sampled:
            request.pending -= 1
        for row in launched.drafted:
            row.request.pending -= len(row.drafts)
        starts = dict(zip(plan.slots, plan.starts, strict=True))
        of_step = [request for request in self.running if request.slot in starts]
        for request in of_step:
            self.caches.forget_from(request, starts[_slot(request)])
        while self.running:
            self._preempt(self.running[-1])
        self._masks.forget()
        self._reports.forget(plan)
        youngest = max(of_step, key=lambda request: request.id)
        youngest.error = error
        self._finish(youngest, "error")
        return Output(youngest.id, NO_TOKEN, None, "error", youngest.cached_tokens or 0, youngest.queued_s)

    def _decode(self, agenda: Agenda, budget: int) -> bool:
        """One token for each that is ready. True if some had to give up their blocks for it."""
        due = [request for request in self._ready.values() if request.computed == request.room]
        for request in due:
            if request.room == request.longest - 1:
                del self._ready[request.id]
        rows, in_need = list(self._ready.values()), [request for request in due if request.id in self._ready]
        if self.speculation is not None:
            rows = self._without_waiting(rows, self.speculation)
            in_need = [request for request in in_need if request in rows]
        if len(rows) > budget:
            rows = heapq.nsmallest(budget, rows, key=_order)
            in_need = [request for request in in_need if request in rows]
        preemptions = self.preemptions
        for request in in_need:
            self.caches.trim(request)
        while len(in_need) * self.caches.layout.groups > self.pool.available:
            victim = self.running[-1]
            self._preempt(victim)
            rows, in_need = ([each for each in some if each is not victim] for some in (rows, in_need))
        for request in in_need:
            agenda.give(_slot(request), self.caches.grow(request))
        if self.speculation is not None and rows:
            rows = self._draft(agenda, rows, budget, self.speculation)
        rows.sort(key=_computed, reverse=True)
        agenda.decodes, agenda.starts = rows, list(map(_computed, rows))
        for request in rows:
            request.computed += 1
            if request.matcher is not None:
                agenda.constrained = True
                del self._ready[request.id]
        if self.caches.takes_snapshots:
            for request in rows:
                self._save(agenda, request)
        return self.preemptions > preemptions

    def _without_waiting(self, rows: list[Request], speculation: Speculation) -> list[Request]:
        """Without those that may get drafts once a token that is on its way is read."""
        return [request for request in rows if not (request.pending and speculation.waits_for(request, len(rows)))]

    def _draft(self, agenda: Agenda, rows: list[Request], budget: int, speculation: Speculation) -> list[Request]:
        """Give drafts to some of these rows. Returns those that compute one token.

        With drafts there are no more tokens than requests may run: so many fit a graph. Who has tokens to compute again
        goes first, and a row that is then too many waits a step.
        """
        rows.sort(key=lambda request: not request.rewound)
        room = min(budget, self.limits.max_num_seqs) - sum(request.rest for request in rows)
        proposed = speculation.propose([request for request in rows if not request.pending], len(rows), room)
        left, plain = budget, []
        for request in rows:
            if request.rest > left:
                continue
            drafts = self._drafts_that_fit(agenda, request, proposed.get(request.id, []))
            masks: list[bytes] = []
            if request.matcher is not None and (drafts or request.rest > 1):
                masks = request.matcher.masks(drafts)
                drafts = drafts[: len(masks) - 1]
            left -= request.rest + len(drafts)
            if drafts or request.rest > 1:
                self._compute_drafts(agenda, request, drafts, masks)
                continue
            plain.append(request)
            if request.untold:
                self._tell(agenda, request, [])
        return plain

    def _drafts_that_fit(self, agenda: Agenda, request: Request, drafts: list[int]) -> list[int]:
        """As many as there are blocks for, with one more if it is to be had, and as many as the answer may have."""
        if drafts and request.length + len(drafts) > request.room < request.longest - 1:
            self.caches.trim(request)
            has_grown = any(slot == request.slot for slot, _ in agenda.blocks)
            if not has_grown and self.pool.available >= self.caches.layout.groups + self._kept_free(request):
                agenda.give(_slot(request), self.caches.grow(request))
        return drafts[: max(0, request.room - request.length)]

    def _compute_drafts(self, agenda: Agenda, request: Request, drafts: list[int], masks: Sequence[bytes]) -> None:
        """A row of all tokens that are to be computed, and drafts. It is read before the request goes on."""
        agenda.constrained |= request.matcher is not None
        slot, start = _slot(request), request.computed
        if self.caches.layout.states:
            twin = self.caches.layout.twins[slot]
            agenda.restored.append((twin, slot) if request.rewound else (slot, twin))
        self._tell(agenda, request, drafts)
        count = request.rest + len(drafts)
        request.computed += count
        del self._ready[request.id]
        agenda.drafted.append(Drafted(request, start, count, drafts, masks))

    def _tell(self, agenda: Agenda, request: Request, drafts: list[int]) -> None:
        """Rows of drafts leave it open which token was the last one: the next row is told."""
        agenda.told.append((_slot(request), request.computed, request.tokens[request.computed :] + drafts))
        request.untold = False

    def _save(self, agenda: Agenda, request: Request) -> None:
        place = self.caches.save(request)
        if place is not None:
            agenda.saved.append((_slot(request), place))

    def _continue_prompts(self, agenda: Agenda, budget: int, may_admit: bool) -> int:
        """Chunks for the prompts that have begun. Returns the tokens they take, and those that pass a long one."""
        left = budget
        prompts = sorted(self._prompts.values(), key=_order)
        if prompts and self._is_long(prompts[0]):
            first = prompts[0]
            part = self._passing.part(first.id, first.rest, budget)
            for request in prompts[1:]:
                if not self._is_long(request):
                    taken = self._compute(agenda, request, part)
                    part, left = part - taken, left - taken
            if may_admit and part:
                left -= self._admit(agenda, part, self._shorter())
            self._passing.took(budget - left)
            prompts = [first]
        for request in prompts:
            left -= self._compute(agenda, request, left)
        return budget - left

    def _is_long(self, request: Request) -> bool:
        """Whether one step cannot hold all of a prompt that is not in the cache."""
        most = self.limits.max_num_batched_tokens
        if request.rest > most and request.phase is Phase.WAITING:
            return request.rest - self.caches.found(request) > most
        return request.rest > most

    def _shorter(self) -> list[Request]:
        """Waiting requests that one step could hold, as far as nobody of a better priority waits."""
        if not self.waiting or not self._free_slots:
            return []
        best = self.waiting[0].params.priority
        alike = takewhile(lambda request: request.params.priority == best, self.waiting)
        return list(islice((each for each in alike if not self._is_long(each)), len(self._free_slots)))

    def _admit(self, agenda: Agenda, budget: int, candidates: Iterable[Request]) -> int:
        """Let requests in until one has to wait. Returns the tokens they take."""
        left = budget
        for request in list(islice(candidates, len(self._free_slots))) if left else ():
            if not left or request.pending or not self.caches.take(request, self._kept_free(request)):
                break
            self._enter_batch(agenda, request)
            left -= self._compute(agenda, request, left)
        return budget - left

    def _kept_free(self, request: Request) -> int:
        if not self.running:
            return 0
        groups = self.caches.layout.groups
        return groups * kept_free(self.pool.num_blocks // groups, len(self.running), again=request.preemptions > 0)

    def _enter_batch(self, agenda: Agenda, request: Request) -> None:
        _remove(self.waiting, request)
        insort(self.running, request, key=_order)
        request.phase = Phase.RUNNING
        request.slot = slot = heapq.heappop(self._free_slots)
        if request.cached_tokens is None:
            request.cached_tokens, request.queued_s = request.computed, time.monotonic() - request.arrived
            self.prefix_queries += len(request.tokens)
            self.prefix_hits += request.computed
        agenda.admissions.append(
            Admission(slot, request.prompt_length, list(request.tokens), request.seed, request.params)
        )
        agenda.give(slot, [list(request.blocks), *request.windows])
        if request.restored is not None:
            agenda.restored.append((request.restored, slot))

    def _compute(self, agenda: Agenda, request: Request, most: int) -> int:
        """A chunk of a prompt. Where only one token is left, or only the next one to sample, it is ready to decode."""
        count = min(request.rest, most)
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
            self._prompts[request.id] = request
            return count
        self._prompts.pop(request.id, None)
        if request.rest == 1 or request.matcher is None:
            self._ready[request.id] = request
        return count

    def _conclude(self, request: Request, token: int) -> str | None:
        """Why a request ends, if it does; one under a grammar that goes on is ready for its next token."""
        reason = self._finish_reason(request, token)
        if reason is not None:
            self._finish(request, reason)
        elif request.matcher is not None and request.phase is Phase.RUNNING:
            self._ready[request.id] = request
        return reason

    def _finish_reason(self, request: Request, token: int) -> str | None:
        """A complete grammar ends the answer whatever else the request asks for; a failed one ends it with an error."""
        if request.matcher is not None:
            try:
                request.matcher.accept(token)
            except RequestError as error:
                request.error = error
                return "error"
            if request.matcher.finished:
                return "stop"
        if token in request.ends and len(request.tokens) - request.prompt_length >= request.params.min_tokens:
            return "stop"
        return "length" if len(request.tokens) >= request.longest else None

    def _preempt(self, request: Request) -> None:
        self._leave_batch(request)
        request.phase = Phase.WAITING
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=_order)

    def _finish(self, request: Request, reason: str) -> None:
        if request.phase is Phase.RUNNING:
            self._leave_batch(request)
        else:
            _remove(self.waiting, request)
        request.phase = Phase.FINISHED
        request.finish_reason = reason
        if self.speculation is not None:
            self.speculation.forget(request)
        del self.requests[request.id]

    def _leave_batch(self, request: Request) -> None:
        _remove(self.running, request)
        self._ready.pop(request.id, None)
        self._prompts.pop(request.id, None)
        self.caches.release(request)
        heapq.heappush(self._free_slots, _slot(request))
        request.slot = None
        request.untold = request.rewound = False


def _remove(ordered: list[Request], request: Request) -> None:
    del ordered[bisect_left(ordered, request.order, key=_order)]
