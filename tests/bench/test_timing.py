"""One run in virtual time: what is timed are exactly the steps in which all requests decode, by both clocks."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import pytest

from phalanx.bench import timing
from phalanx.bench.timing import FixedBatch, Timing, settled_memory, time_case, time_requests
from phalanx.engine import core
from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.modelled import ModelledRunner
from phalanx.engine.scheduler import Limits, Scheduler
from phalanx.engine.step_plan import StepPlan
from phalanx.errors import ConfigError

BETWEEN = 0.25


@dataclass
class Virtual:
    """An engine whose steps take what their plans say, no two the same, and whose host takes `BETWEEN` behind each."""

    budget: int = 64
    depth: int = 1
    blocks: int = 200
    plans: list[tuple[StepPlan, float]] = field(default_factory=list)
    between: float = 0.0

    def __post_init__(self) -> None:
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=self.budget, max_model_len=200)
        self.runner = ModelledRunner(self.price, depth=self.depth)
        self.scheduler = Scheduler(limits, BlockPool(self.blocks, 16, prefix_caching=False))
        self.engine = Engine(self.scheduler, self.runner, vocab=100)
        self._apply, self.scheduler.apply = self.scheduler.apply, self.apply  # type: ignore[method-assign]

    def price(self, plan: StepPlan) -> float:
        self.plans.append((plan, 1.0 + plan.num_tokens + sum(plan.starts) / 1e3))
        return self.plans[-1][1]

    def apply(self, *result: object) -> object:
        self.between += BETWEEN
        return self._apply(*result)  # type: ignore[arg-type]

    def perf_counter(self) -> float:
        return self.runner.clock + self.between

    def prices(self, batch: int, inputs: int) -> tuple[list[float], list[float], list[float]]:
        """Of the steps up to the last prompt, of those that decode the whole batch, and of all."""
        last = max(place for place, (plan, _) in enumerate(self.plans) if min(plan.starts) < inputs)
        prices = [price for _, price in self.plans]
        return prices[: last + 1], [price for plan, price in self.plans[last + 1 :] if len(plan.slots) == batch], prices


def virtual(monkeypatch: pytest.MonkeyPatch, **options: int) -> Virtual:
    made = Virtual(**options)
    for module in (timing, core):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("batch", "inputs", "outputs", "budget"), [(1, 9, 2, 64), (4, 10, 16, 64), (5, 50, 30, 32)])
def test_the_wall_and_the_clocks_tell_of_the_same_steps(
    monkeypatch: pytest.MonkeyPatch, batch: int, inputs: int, outputs: int, budget: int, depth: int
) -> None:
    """In the last case prompts are computed beside answers, and answers end one after the other."""
    made = virtual(monkeypatch, budget=budget, depth=depth)
    told = time_requests(made.engine, [(inputs, outputs)] * batch, seed=0)
    prompts, decodes, every = made.prices(batch, inputs)
    assert (len(prompts) > 1) == (batch == 5)
    assert told.steps == told.tokens == len(decodes) >= 1
    assert told.decode_clocks.device == pytest.approx(sum(decodes))
    assert told.decode == pytest.approx(sum(decodes) + BETWEEN * len(decodes))
    assert told.tpot - told.clocked(on_gpu=True) == pytest.approx(BETWEEN)
    assert told.prompt_clocks.device == pytest.approx(sum(prompts))
    assert told.first == pytest.approx(sum(prompts) + BETWEEN * len(prompts))
    assert told.whole == pytest.approx(sum(every) + BETWEEN * len(every))


def test_where_requests_never_decode_together_it_is_said_how_long_answers_have_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = virtual(monkeypatch, budget=32)
    with pytest.raises(ConfigError, match="An answer ends before the last prompt") as refused:
        _ = time_case(made.engine, FixedBatch(5, 50, 3), repeats=1).tpot
    enough = next(outputs for outputs in range(2, 30) if time_five(made.engine, outputs).steps)
    assert refused.value.fix.startswith(f"Let answers have more than {enough - 1} tokens")


def time_five(engine: Engine, outputs: int) -> Timing:
    return time_requests(engine, [(50, outputs)] * 5, seed=0)


def test_runs_are_repeated_until_enough_steps_are_timed_and_the_fastest_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = virtual(monkeypatch)
    case = FixedBatch(2, 8, 5)
    whole = [9.0, 3.0, 5.0, 7.0]
    runs: list[int] = []

    def timed(engine: Engine, lengths: list[tuple[int, int]], seed: int, one_prompt: bool = False) -> Timing:
        runs.append(seed)
        told = time_requests(engine, lengths, seed, one_prompt)
        return Timing(**{**vars(told), "whole": whole[seed]})

    monkeypatch.setattr(timing, "time_requests", timed)
    assert time_case(made.engine, case, repeats=2, iterations=13).whole == 3.0
    assert runs == [0, 0, 1, 2, 3]


def test_a_batch_that_finds_no_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = virtual(monkeypatch, blocks=13)
    with pytest.raises(ConfigError, match="no room for all of 4x10x120"):
        time_case(made.engine, FixedBatch(4, 10, 120), repeats=1)


@pytest.mark.parametrize("one_prompt", [False, True])
def test_prompts_differ_unless_one_is_asked_for(one_prompt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Virtual()
    prompts: list[list[int]] = []
    add = made.engine.add
    monkeypatch.setattr(made.engine, "add", lambda prompt, params: prompts.append(prompt) or add(prompt, params))  # type: ignore[func-returns-value]
    time_requests(made.engine, [(30, 1), (20, 1), (30, 1)], 0, one_prompt)
    first, shorter, last = prompts
    assert [len(first), len(shorter), len(last)] == [30, 20, 30]
    assert (first == last) == (first[:20] == shorter) == one_prompt


@pytest.mark.parametrize("case", ["4x10x16", "8x64x40"])
def test_before_anything_is_timed_all_requests_have_decoded_together(case: str) -> None:
    """Else a first run would hold the time to compile what most of its steps need."""
    batch, made = FixedBatch.parse(case).batch, Virtual(budget=32)
    time_case(made.engine, FixedBatch.parse(case), repeats=1)
    plans = [plan for plan, _ in made.plans]
    together = next(index for index, plan in enumerate(plans) if plan.counts == [1] * batch)
    assert sum(len(plan.admissions) for plan in plans[: together + 1]) == batch


@pytest.mark.usefixtures("nothing_frozen")
def test_the_garbage_collector_looks_away_only_while_requests_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "settled_memory", settled_memory)
    made, kept = Virtual(), list[int]()
    monkeypatch.setattr(made, "price", lambda plan: kept.append(gc.get_freeze_count()) or 1.0)  # type: ignore[func-returns-value]
    made.runner._price = made.price
    time_requests(made.engine, [(30, 1)], 0)
    assert min(kept) > 0
    assert gc.get_freeze_count() == 0
