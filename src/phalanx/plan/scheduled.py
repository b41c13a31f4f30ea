"""A batch in virtual time, run by the engine's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from phalanx.cost.rules import Rules
from phalanx.engine.blocks import BlockPool
from phalanx.engine.defaults import BLOCK_SIZE
from phalanx.engine.modelled import ModelledRunner
from phalanx.engine.request import Request
from phalanx.engine.roster import KEPT_FREE
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits
from phalanx.engine.step_plan import StepPlan
from phalanx.engine.step_sums import StepSums
from phalanx.plan.policies import POLICIES
from phalanx.spec.workload import Workload

MostSteps = Callable[[StepSums], int]


@dataclass(frozen=True)
class Room:
    """What a batch may hold: sequences, tokens of one step, tokens of one sequence, and blocks of KV."""

    sequences: int
    step_tokens: int
    longest: int
    blocks: int

    @classmethod
    def of(cls, workload: Workload, rules: Rules, kv_tokens: int | None) -> Room:
        """`kv_tokens`: room of the KV cache; None means it never runs out."""
        longest = workload.longest + 1
        most = min(rules.max_sequences, workload.concurrency if workload.is_closed_loop else rules.max_sequences)
        if kv_tokens is not None:
            held = workload.mean_input + rules.kv_reserve * workload.mean_output
            most = max(1, min(most, int(kv_tokens / held)))
        blocks = -(-longest // BLOCK_SIZE)
        enough = ceil((blocks * (most + 1) + most) / (1 - KEPT_FREE))
        room = enough if kv_tokens is None else max(blocks, kv_tokens // BLOCK_SIZE)
        return cls(most, max(rules.max_batched_tokens, 1), longest, room)


@dataclass(frozen=True)
class Moves:
    """One step: what it computed, and the requests that got a token for the first time or their last one."""

    step: StepSums
    first: list[int]
    last: list[int]


class ScheduledBatch:
    """Every row of every step passes through the scheduler that serves."""

    def __init__(self, workload: Workload, rules: Rules, kv_tokens: int | None) -> None:
        room = Room.of(workload, rules, kv_tokens)
        pool = BlockPool(room.blocks, BLOCK_SIZE, prefix_caching=workload.shared_prefix > 0 or bool(workload.sessions))
        limits = Limits(room.sequences, room.step_tokens, room.longest)
        self._scheduler = POLICIES[rules.admission](limits, pool)
        self._runner = ModelledRunner(self._record)
        self._workload = workload
        self._requests: list[Request] = []
        self._step = StepSums()
        self._begun: set[int] = set()
        self._said: dict[int, list[int]] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._scheduler.requests)

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    @property
    def cached_tokens(self) -> int:
        return sum(request.cached_tokens or 0 for request in self._requests)

    def add(self, index: int, input_tokens: int, output_tokens: int) -> None:
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        prompt = self._prompt(index, input_tokens)
        if self._workload.sessions:
            prompt = self._turn(index, input_tokens, output_tokens)
        request = Request(index, prompt, params, seed=0, salt=None)
        self._requests.append(request)
        self._scheduler.add(request)

    def _turn(self, index: int, length: int, output: int) -> list[int]:
        """What its session has said so far, as much as fits, and something new; every answer is of token 0."""
        session = self._workload.sessions[index]
        before = self._said.get(session, [])[: length - 1]
        prompt = before + [1 + index] * (length - len(before))
        self._said[session] = prompt + [0] * output
        return prompt

    def _prompt(self, index: int, length: int) -> list[int]:
        if not self._workload.shared_prefix:
            return [0] * length
        shared = min(self._workload.shared_prefix, length)
        return [index % self._workload.agents] * shared + [self._workload.agents + index] * (length - shared)

    def step(self) -> Moves:
        plan = self._scheduler.schedule()
        assert plan is not None, "requests are waiting but nothing can run"
        self._runner.launch(plan)
        outputs = self._scheduler.apply(self._runner.collect())
        first = [output.request_id for output in outputs if output.request_id not in self._begun]
        self._begun.update(first)
        last = [output.request_id for output in outputs if output.finish_reason is not None]
        return Moves(self._step, first, last)

    def _record(self, plan: StepPlan) -> float:
        self._step = plan.sums()
        return 0.0

    def leap(self, most: MostSteps) -> tuple[StepSums, int] | None:
        """Take all steps up to the next change at once, each a decode of the same requests: their mean and number."""
        running, pool = self._scheduler.running, self._scheduler.pool
        if not running or self._step.prompt_tokens:
            return None
        count = min((request.params.max_tokens or 1) - len(request.output) for request in running) - 1
        computed = sum(request.computed for request in running)
        count = min(count, most(StepSums(len(running), computed)))
        while count > 0 and sum(self._missing(request, count) for request in running) > pool.available:
            count //= 2
        if count <= 0:
            return None
        for request in running:
            for _ in range(self._missing(request, count)):
                self._scheduler.caches.grow(request)
            request.tokens.extend([0] * count)
            request.computed += count
        return StepSums(len(running), computed + len(running) * (count + 1) / 2), count

    def _missing(self, request: Request, count: int) -> int:
        return self._scheduler.pool.blocks_for(request.computed + count) - len(request.blocks)
