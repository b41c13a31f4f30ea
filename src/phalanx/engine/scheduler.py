"""The scheduler: which tokens of which requests run in the next step."""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass, field

from phalanx.engine.blocks import BlockPool
from phalanx.engine.plan import Admission, StepPlan, StepResult, TokenLogprobs
from phalanx.engine.request import Phase, Request
from phalanx.errors import ConfigError, RequestError

KEPT_FREE = 0.02
"""The share of all blocks that admissions leave to running requests to grow into."""


@dataclass(frozen=True)
class Limits:
    """What one step and the whole batch may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class Output:
    """One new token of a request, and why it ends if it does.

    `cached_tokens` of its prompt came from the cache; it had waited `queued_s` seconds for its first step.
    """

    request_id: int
    token: int
    logprobs: TokenLogprobs | None
    finish_reason: str | None
    cached_tokens: int
    queued_s: float


@dataclass
class _Rows:
    """The rows of the step being planned, and the requests behind them."""

    admissions: list[Admission] = field(default_factory=list)
    rows: list[tuple[Request, int, int, list[int]]] = field(default_factory=list)

    def to_plan(self, step: int) -> tuple[StepPlan, list[Request]]:
        """Single tokens first, of long sequences before short ones, so that a GPU does not end on a long one."""
        ordered = sorted(self.rows, key=lambda row: (row[2] != 1, -row[1] if row[2] == 1 else 0))
        samples = [start + count == request.length for request, start, count, _ in ordered]
        plan = StepPlan(
            step=step,
            admissions=self.admissions,
            slots=[_slot(request) for request, *_ in ordered],
            starts=[start for _, start, _, _ in ordered],
            counts=[count for _, _, count, _ in ordered],
            samples=samples,
            new_blocks=[blocks for *_, blocks in ordered],
            masks=[
                (index, row[0].matcher.mask())
                for index, (row, sampled) in enumerate(zip(ordered, samples, strict=True))
                if sampled and row[0].matcher is not None
            ],
        )
        return plan, [row[0] for row, sampled in zip(ordered, samples, strict=True) if sampled]


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot


class Scheduler:
    """First come, first served, in one token budget.

    Running requests go first, in order of arrival: one token for a decode, a chunk for a prompt not yet computed. Then
    waiting requests are admitted while slots, tokens and blocks last; an admitted request gets all blocks of its prompt
    at once, and leaves some to the running ones, or one of them would soon have to go again. When a running request
    needs a block and none is left, the youngest running request gives up its blocks and its slot and waits to be
    computed again (preemption by recompute). A request under a grammar waits in the batch for its last token to be
    read, while others run ahead.
    """

    def __init__(self, limits: Limits, pool: BlockPool, eos_token_ids: tuple[int, ...] = ()) -> None:
        if min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len) < 1:
            raise ConfigError("bad_limits", f"Nothing can run under {limits}.", "Every limit must be at least 1.")
        if pool.blocks_for(limits.max_model_len) > pool.num_blocks:
            room = pool.num_blocks * pool.block_size
            raise ConfigError(
                "kv_too_small",
                f"The KV cache holds {room} tokens, but one sequence may have {limits.max_model_len}.",
                f"Lower max_model_len to {room} or give the KV cache more memory.",
            )
        self.limits = limits
        self.pool = pool
        self.eos_token_ids = frozenset(eos_token_ids)
        self.requests: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(limits.max_num_seqs))
        self._in_flight: deque[tuple[int, list[Request]]] = deque()
        self._step = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        self.waiting.append(request)

    def cancel(self, request_id: int) -> bool:
        """End a request in whatever phase it is; its blocks are free at once. False if it is not known any more."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "cancelled")
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a launched step is applied."""
        rows = _Rows()
        budget, preempted = self._schedule_running(rows, self.limits.max_num_batched_tokens)
        if not preempted:
            self._admit_waiting(rows, budget)
        if not rows.rows:
            return None
        self._step += 1
        plan, sampled = rows.to_plan(self._step)
        for request in sampled:
            request.pending += 1
        self._in_flight.append((self._step, sampled))
        return plan

    def apply(self, result: StepResult) -> list[Output]:
        """Book the tokens of the oldest launched step. Requests that ended meanwhile take no part."""
        step, sampled = self._in_flight.popleft()
        assert step == result.step, f"step {result.step} came back, step {step} was due"
        outputs = []
        for request, token, logprobs in zip(sampled, result.tokens, result.logprobs, strict=True):
            if request.phase is Phase.FINISHED:
                continue
            request.pending -= 1
            request.tokens.append(token)
            reason = self._finish_reason(request, token)
            if reason is not None:
                self._finish(request, reason)
            elif request.phase is Phase.RUNNING:
                self._register(request)
            cached, queued = request.cached_tokens or 0, request.queued_s or 0.0
            outputs.append(Output(request.id, token, logprobs, reason, cached, queued))
        return outputs

    def _schedule_running(self, rows: _Rows, budget: int) -> tuple[int, bool]:
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.length - request.computed, budget)
            if count == 0 or request.awaits_mask or self._is_full(request):
                index += 1
                continue
            missing = self.pool.blocks_for(request.computed + count) - len(request.blocks)
            while missing > self.pool.available and self.running[-1] is not request:
                self._preempt(self.running[-1])
                preempted = True
            if missing > self.pool.available:
                self._preempt(request)
                return budget, True
            new_blocks = self.pool.allocate(missing)
            request.blocks += new_blocks
            self._advance(rows, request, count, new_blocks)
            budget -= count
            index += 1
        return budget, preempted

    def _admit_waiting(self, rows: _Rows, budget: int) -> None:
        while self.waiting and self._free_slots and budget > 0:
            request = self.waiting[0]
            if request.pending or not self._take_blocks(request):
                return
            self.waiting.popleft()
            request.phase = Phase.RUNNING
            request.slot = heapq.heappop(self._free_slots)
            self.running.append(request)
            rows.admissions.append(
                Admission(request.slot, request.prompt_length, list(request.tokens), request.seed, request.params)
            )
            count = min(request.length - request.computed, budget)
            self._advance(rows, request, count, list(request.blocks))
            budget -= count

    def _take_blocks(self, request: Request) -> bool:
        """Blocks for all tokens of a waiting request: cached ones first. The last token is always computed anew."""
        cached: list[int] = []
        parent = request.cache_parent
        if self.pool.cache is not None:
            cached, parent = self.pool.cache.match(request.tokens[:-1], request.salt)
        fresh = self.pool.blocks_for(len(request.tokens)) - len(cached)
        revived = sum(self.pool.is_idle(block) for block in cached)
        others_run = self.pool.available < self.pool.num_blocks
        kept_free = int(KEPT_FREE * self.pool.num_blocks) if others_run else 0
        if fresh + revived + kept_free > self.pool.available:
            return False
        self.pool.hold(cached)
        request.blocks = cached + self.pool.allocate(fresh)
        request.computed = len(cached) * self.pool.block_size
        request.registered_blocks, request.cache_parent = len(cached), parent
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
            request.queued_s = time.monotonic() - request.arrived
            self.prefix_queries += len(request.tokens)
            self.prefix_hits += request.computed
        return True

    def _advance(self, rows: _Rows, request: Request, count: int, new_blocks: list[int]) -> None:
        rows.rows.append((request, request.computed, count, new_blocks))
        request.computed += count
        self._register(request)

    def _register(self, request: Request) -> None:
        """Offer blocks that are full of known tokens to the prefix cache."""
        if self.pool.cache is None:
            return
        size = self.pool.block_size
        for index in range(request.registered_blocks, min(request.computed, len(request.tokens)) // size):
            tokens = request.tokens[index * size : (index + 1) * size]
            request.cache_parent = self.pool.cache.insert(request.cache_parent, tokens, request.blocks[index])
            request.registered_blocks = index + 1

    def _is_full(self, request: Request) -> bool:
        """Every token it may have is launched already; only reading back is left."""
        most = request.params.max_tokens
        return request.length >= self.limits.max_model_len or (most is not None and request.outputs_launched >= most)

    def _finish_reason(self, request: Request, token: int) -> str | None:
        """A complete grammar ends the answer whatever else the request asks for; a failed one ends it with an error."""
        params, produced = request.params, len(request.tokens) - request.prompt_length
        if request.matcher is not None:
            try:
                request.matcher.accept(token)
            except RequestError as error:
                request.error = error
                return "error"
            if request.matcher.finished:
                return "stop"
        if produced >= params.min_tokens:
            if token in self.eos_token_ids and not params.ignore_eos:
                return "stop"
            if token in params.stop_token_ids:
                return "stop"
        if params.max_tokens is not None and produced >= params.max_tokens:
            return "length"
        return "length" if len(request.tokens) >= self.limits.max_model_len else None

    def _preempt(self, request: Request) -> None:
        self._leave_batch(request)
        request.phase = Phase.WAITING
        request.computed = 0
        request.registered_blocks, request.cache_parent = 0, request.salt
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _finish(self, request: Request, reason: str) -> None:
        if request.phase is Phase.RUNNING:
            self._leave_batch(request)
        else:
            self.waiting.remove(request)
        request.phase = Phase.FINISHED
        request.finish_reason = reason
        del self.requests[request.id]

    def _leave_batch(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks = []
        heapq.heappush(self._free_slots, _slot(request))
        request.slot = None
