"""The scheduler: which tokens of which requests run in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from phalanx.engine.agenda import Agenda, Launched
from phalanx.engine.blocks import BlockPool
from phalanx.engine.caches import CacheLayout, Caches
from phalanx.engine.filler import StepFiller
from phalanx.engine.logprobs import TokenLogprobs
from phalanx.engine.masks import MaskBook, places_for
from phalanx.engine.output import NO_TOKEN, Output
from phalanx.engine.reports import Reports
from phalanx.engine.request import Phase, Request
from phalanx.engine.speculation import Speculation
from phalanx.engine.step_plan import StepPlan, StepResult
from phalanx.errors import ConfigError, RequestError

Trace = Callable[[int, int], str]

_slot = attrgetter("slot")


@dataclass(frozen=True)
class Limits:
    """What one step and the whole batch may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Scheduler(StepFiller):
    """Requests in, steps out, and the tokens that come back booked: see `StepFiller` for who is served when."""

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
        super().__init__(Caches(pool, layout), limits.max_num_seqs, limits.max_num_batched_tokens, speculation)
        if not self.caches.has(self.caches.need_of(limits.max_model_len)):
            room = self.caches.layout.longest(pool.num_blocks, pool.block_size)
            raise ConfigError(
                "kv_too_small",
                f"The KV cache holds {room} tokens, but one sequence may have {limits.max_model_len}.",
                f"Lower max_model_len to {room} or give the KV cache more memory.",
            )
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self._masks = MaskBook(places_for(limits.max_num_seqs))
        self._in_flight: deque[Launched] = deque()
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
        self._wait(request)

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
            assert not [*agenda.blocks, *agenda.window_blocks], "blocks that nobody is told of"
            return None
        self._step += 1
        if self.speculation is not None:
            self.speculation.look_ahead(agenda)
        plan, sampled = agenda.to_plan(self._step, self._masks)
        plan = self._reports.mark(plan)
        for prompt, _, _ in agenda.prompts:
            self.caches.settle(prompt)
        for request in sampled:
            request.pending += 1
        for row in agenda.drafted:
            row.request.pending += len(row.drafts)
        self._in_flight.append(Launched(plan, sampled, agenda.drafted))
        return plan

    def apply(self, result: StepResult, trace: Trace | None = None) -> list[Output]:
        """Book the tokens of the oldest launched step. Requests that ended meanwhile take no part.

        One whose scores were not finite ends with an error that says what `trace` makes of its slot and position.
        """
        launched = self._in_flight.popleft()
        assert launched.plan.step == result.step, f"step {result.step} came back, {launched.plan.step} was due"
        booked: Iterable[tuple[Request, int, TokenLogprobs | None]]
        booked = zip(launched.sampled, result.tokens, result.logprobs, strict=not launched.drafted)
        self._sharing.pace.learn(launched.plan.num_tokens, result.times.total)
        if self._drafting is not None:
            self._drafting.observe(launched, result)
            if launched.drafted:
                booked = self._drafting.proven(launched, result)
        outputs = []
        block_size, running, finished, broken = self.pool.block_size, Phase.RUNNING, Phase.FINISHED, NO_TOKEN
        for request, token, logprobs in booked:
            if request.phase is finished:
                continue
            tokens, reason = request.tokens, None
            length = len(tokens)
            request.pending -= 1
            if token == broken:
                outputs += self._break_off(request, trace)
                continue
            if not length % block_size and request.phase is running:
                self.caches.register(request)
            tokens.append(token)
            if token in request.ends or length + 1 >= request.longest or request.matcher is not None:
                reason = self._conclude(request, token)
            cached, queued_s, drafted = request.cached_tokens or 0, request.queued_s, request.drafted
            outputs.append(Output(request.id, token, logprobs, reason, cached, queued_s, None, None, drafted))
        return self._reports.complete(result, outputs) if self._reports.any_in_flight else outputs

    def abandon(self, plan: StepPlan, error: RequestError) -> Output:
        """The newest step, `plan`, did not run: its youngest request ends with this error.

        All others are computed again, but for what is cached from before that step: of this one nothing is sure.
        """
        launched = self._in_flight.pop()
        assert launched.plan is plan, f"step {plan.step} did not run, step {launched.plan.step} was the last one"
        of_step = self._forget(launched)
        self._preempt_all()
        youngest = max(of_step, key=lambda request: request.id)
        youngest.error = error
        self._finish(youngest, "error")
        return Output(youngest.id, NO_TOKEN, None, "error", youngest.cached_tokens or 0, youngest.queued_s)

    def discard(self) -> None:
        """No launched step is to be relied on: all that run are computed again, but for what is cached from before."""
        while self._in_flight:
            self._forget(self._in_flight.pop())
        self._preempt_all()

    def _forget(self, launched: Launched) -> list[Request]:
        """A step that has no results. Returns its requests, as far as they still run."""
        for request in launched.sampled:
            request.pending -= 1
        for row in launched.drafted:
            row.request.pending -= len(row.drafts)
        starts = dict(zip(launched.plan.slots, launched.plan.starts, strict=True))
        of_step = [request for request in self.running if request.slot in starts]
        for request in of_step:
            self.caches.forget_from(request, starts[_slot(request)])
        self._reports.forget(launched.plan)
        return of_step

    def _preempt_all(self) -> None:
        while self.running:
            self.preempt(self.running[-1])
        self._masks.forget()

    def _break_off(self, request: Request, trace: Trace | None) -> list[Output]:
        """End a request whose scores are not finite, with the place where that began. What it cached is not used.

        One that has been preempted meanwhile is computed again anyway.
        """
        if request.phase is not Phase.RUNNING:
            return []
        place = trace(_slot(request), len(request.tokens) - 1) if trace is not None else "an unknown place"
        request.error = RequestError(
            "not_finite",
            f"At token {len(request.tokens)} the numbers of this request ceased to be finite, in {place}.",
            "Send it again. If it recurs, the weights overflow in this dtype, or are damaged.",
        )
        self.caches.forget_from(request, 0)
        self._finish(request, "error")
        return [Output(request.id, NO_TOKEN, None, "error", request.cached_tokens or 0, request.queued_s)]

    def _conclude(self, request: Request, token: int) -> str | None:
        """Why a request ends, if it does; one under a grammar that goes on is ready for its next token."""
        reason = request.end_behind(token)
        if reason is not None:
            self._finish(request, reason)
        elif request.matcher is not None and request.phase is Phase.RUNNING:
            self.ready[request.id] = request
        return reason

    def _finish(self, request: Request, reason: str) -> None:
        self._strike(request)
        request.finish_reason = reason
        if self.speculation is not None:
            self.speculation.forget(request)
