"""EngineTracer: follows an engine for some steps, and has its ranks do the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from phalanx.engine.core import Engine
from phalanx.engine.marks import MOST_LAYERS, MOST_STEPS, Hooks, HostStep, RankTrace, StepTraces
from phalanx.engine.step_plan import StepPlan, StepResult
from phalanx.errors import ConfigError


@runtime_checkable
class Traceable(Protocol):
    """A runner whose ranks can be followed. Both are called between steps."""

    def start_trace(self) -> int:
        """How many layers all ranks have together."""
        ...

    def end_trace(self) -> list[RankTrace]: ...


class EngineTracer:
    """Between its making and its end every step is written down. `finished` gets them once there are `steps`.

    Nothing in the engine asks whether it is traced: hooks are put around its methods, and taken away at the end.
    """

    def __init__(self, engine: Engine, steps: int, finished: Callable[[StepTraces], None]) -> None:
        if not isinstance(engine.runner, Traceable):
            raise ConfigError("not_traced", "This engine's ranks cannot be traced.", "Trace one with a real model.")
        self._engine = engine
        self._runner: Traceable = engine.runner
        self._finished = finished
        self._hosts: list[HostStep] = []
        self._by_step: dict[int, HostStep] = {}
        self._hooks = Hooks()
        layers = self._runner.start_trace()
        self._steps = max(1, min(steps, MOST_STEPS, MOST_LAYERS // max(layers, 1)))
        self._hooks.around(engine.scheduler, "schedule", self._schedule)
        self._hooks.around(engine.runner, "launch", self._launch)
        self._hooks.around(engine.runner, "collect", self._collect)
        self._hooks.around(engine.scheduler, "apply", self._apply)

    def end(self) -> StepTraces:
        """Of what there is by now. Steps that have not ended are left out."""
        self._hooks.remove()
        scheduler, done = self._engine.scheduler, {host.step for host in self._hosts}
        begun = [request for request in scheduler.requests.values() if request.cached_tokens is not None]
        prompts = (request.tokens[: request.prompt_length] for request in begun)
        ranks = self._runner.end_trace()
        for rank in ranks:
            rank.steps[:] = [step for step in rank.steps if step.ended and step.step in done]
        return StepTraces(
            self._hosts,
            ranks,
            scheduler.pool.num_blocks,
            scheduler.limits.max_num_batched_tokens,
            scheduler.limits.max_num_seqs,
            prompt_tokens=sum(request.prompt_length for request in begun),
            repeated_tokens=repeated_tokens(prompts, scheduler.pool.block_size),
            found_tokens=sum(request.cached_tokens or 0 for request in begun),
        )

    def _schedule(self, schedule: Callable[[], StepPlan | None]) -> Callable[[], StepPlan | None]:
        def traced() -> StepPlan | None:
            begun = time.monotonic_ns()
            plan = schedule()
            if plan is not None:
                sums = plan.sums()
                self._by_step[plan.step] = HostStep(
                    plan.step, begun, time.monotonic_ns(), decodes=sums.decodes, prompt_tokens=sums.prompt_tokens,
                    prompts=sums.prompts, context=int(sums.context),
                )  # fmt: skip
            return plan

        return traced

    def _launch(self, launch: Callable[[StepPlan], None]) -> Callable[[StepPlan], None]:
        def traced(plan: StepPlan) -> None:
            launch(plan)
            self._by_step[plan.step].launched = time.monotonic_ns()

        return traced

    def _collect(self, collect: Callable[[], StepResult]) -> Callable[[], StepResult]:
        def traced() -> StepResult:
            result = collect()
            if result.step in self._by_step:
                self._by_step[result.step].collected = time.monotonic_ns()
            return result

        return traced

    def _apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def traced(result: StepResult, *more: Any) -> Any:
            outputs = apply(result, *more)
            host = self._by_step.pop(result.step, None)
            if host is not None:
                host.applied = time.monotonic_ns()
                self._count(host)
                self._hosts.append(host)
                if len(self._hosts) == self._steps:
                    self._finished(self.end())
            return outputs

        return traced

    def _count(self, host: HostStep) -> None:
        scheduler = self._engine.scheduler
        host.running, host.waiting = len(scheduler.running), len(scheduler.waiting)
        host.free_blocks, host.preemptions = scheduler.pool.available, scheduler.preemptions
        host.prefix_queries, host.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits


def repeated_tokens(prompts: Iterable[Sequence[int]], block_size: int) -> int:
    """Tokens in whole blocks that begin a prompt as they began one before it: what a cache could have found."""
    seen: set[int] = set()
    repeated = 0
    for prompt in prompts:
        chain, is_known = 0, True
        for start in range(0, len(prompt) - block_size + 1, block_size):
            chain = hash((chain, *prompt[start : start + block_size]))
            is_known = is_known and chain in seen
            repeated += block_size if is_known else 0
            seen.add(chain)
    return repeated
