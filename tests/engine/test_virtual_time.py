"""Thousands of requests in virtual time: the planner's use of the engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest

from phalanx.engine import roster
from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.modelled import ModelledRunner
from phalanx.engine.request import Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits, Scheduler
from phalanx.engine.step_plan import StepPlan

from .books import check_books, check_empty

REQUESTS = 3000
MAX_NUM_SEQS = 64
FIXED, PER_TOKEN = 0.008, 0.00005


@dataclass(frozen=True)
class Arrival:
    time: float
    prompt: int
    answer: int


@dataclass(frozen=True)
class Run:
    makespan: float
    first_token_after: list[float]
    admitted: list[int]
    computed_tokens: int
    answered: list[int]
    preemptions: int

    @property
    def mean_ttft(self) -> float:
        return sum(self.first_token_after) / len(self.first_token_after)

    @property
    def throughput(self) -> float:
        return sum(self.answered) / self.makespan


def price(plan: StepPlan) -> float:
    return FIXED + PER_TOKEN * plan.num_tokens


@cache
def poisson(rate: float, count: int = REQUESTS) -> list[Arrival]:
    draw, now, arrivals = random.Random(5), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        arrivals.append(Arrival(now, draw.randint(8, 120), draw.randint(1, 40)))
    return arrivals


def simulate(
    arrivals: list[Arrival], slower: float = 1.0, depth: int = 1, num_blocks: int = 4096, prefix_caching: bool = False
) -> Run:
    """Serve the arrivals; the request's number travels as its seed."""
    admitted: dict[int, None] = {}
    computed = 0

    def watch(plan: StepPlan) -> float:
        nonlocal computed
        computed += plan.num_tokens
        admitted.update(dict.fromkeys(admission.seed for admission in plan.admissions))
        return slower * price(plan)

    runner = ModelledRunner(watch, depth=depth)
    engine = Engine(Scheduler(Limits(MAX_NUM_SEQS, 512, 256), BlockPool(num_blocks, 16, prefix_caching)), runner, 1000)
    requests: list[Request] = []
    first: dict[int, float] = {}
    while engine.has_work or len(requests) < len(arrivals):
        if not engine.has_work:
            runner.clock = max(runner.clock, arrivals[len(requests)].time)
        while len(requests) < len(arrivals) and arrivals[len(requests)].time <= runner.clock:
            number, arrival = len(requests), arrivals[len(requests)]
            prompt = [(number * 7 + index) % 1000 for index in range(arrival.prompt)]
            requests.append(engine.add(prompt, SamplingParams(max_tokens=arrival.answer, seed=number)))
        for output in engine.step():
            first.setdefault(output.request_id, runner.clock)
    check_empty(engine.scheduler)
    ttft = [first[request.id] - arrival.time for request, arrival in zip(requests, arrivals, strict=True)]
    answered = [len(request.output) for request in requests]
    preemptions = sum(request.preemptions for request in requests)
    return Run(runner.clock, ttft, list(admitted), computed, answered, preemptions)


@cache
def light_load() -> Run:
    return simulate(poisson(20.0))


@pytest.mark.parametrize("depth", [1, 2])
def test_thousands_of_requests_get_all_their_tokens(depth: int) -> None:
    result = simulate(poisson(100.0), depth=depth)
    assert result.answered == [arrival.answer for arrival in poisson(100.0)]


def test_every_token_is_computed_once() -> None:
    expected = sum(arrival.prompt + arrival.answer - 1 for arrival in poisson(20.0))
    assert light_load().preemptions == 0
    assert light_load().computed_tokens == expected, "the last token of an answer is never computed"


@pytest.mark.parametrize("num_blocks", [4096, 64])
def test_no_request_is_admitted_before_an_earlier_one(num_blocks: int) -> None:
    result = simulate(poisson(100.0, 600), num_blocks=num_blocks)
    assert result.admitted == list(range(600))
    assert (result.preemptions > 0) == (num_blocks == 64)


def test_a_small_pool_costs_recomputation_and_time_but_no_token() -> None:
    large, small = (simulate(poisson(100.0, 600), num_blocks=num_blocks) for num_blocks in (4096, 64))
    assert small.answered == large.answered
    assert small.computed_tokens > large.computed_tokens
    assert small.makespan > large.makespan


@pytest.mark.parametrize("num_blocks", [128, 256, 384])
def test_blocks_kept_free_spare_preemptions_and_time(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 requests at once, and too few blocks for those that have slots: the last admitted would soon have to go."""
    draw = random.Random(5)
    arrivals = [Arrival(0.0, draw.randint(20, 100), draw.randint(50, 150)) for _ in range(300)]
    kept = simulate(arrivals, num_blocks=num_blocks)
    monkeypatch.setattr(roster, "kept_free", lambda num_blocks, running, again: 0)
    given_out = simulate(arrivals, num_blocks=num_blocks)
    assert kept.answered == given_out.answered
    assert kept.preemptions < 0.3 * given_out.preemptions
    assert kept.makespan < given_out.makespan


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [64, 256])
def test_a_preempted_request_does_not_come_back_into_the_same_shortage(num_blocks: int, depth: int) -> None:
    """Once it is back it keeps its place until every request that runs has needed a block: as many steps as that has.

    What counts are steps with its batch: requests that are admitted behind it have to go before it does.
    """
    block_size, back_since = 16, {}
    runner = ModelledRunner(price, depth=depth)
    engine = Engine(Scheduler(Limits(64, 512, 256), BlockPool(num_blocks, block_size)), runner, 1000)
    draw, running = random.Random(5), engine.scheduler.running
    for number in range(150):
        prompt = [number, *[1] * draw.randint(20, 100)]
        engine.add(prompt, SamplingParams(max_tokens=draw.randint(50, 150), seed=number))
    came_back, step = 0, 0
    while engine.has_work:
        before = {request.id: request.preemptions for request in engine.scheduler.requests.values()}
        engine.step()
        step += 1
        for request in engine.scheduler.requests.values():
            if request.preemptions > before[request.id] and request.id in back_since:
                assert step - back_since.pop(request.id) >= block_size
            elif request.preemptions and request in running and request.id not in back_since:
                back_since[request.id] = step
                came_back += 1
    assert came_back > 10


def test_time_scales_with_the_price() -> None:
    """Twice the price and half the arrival rate is the same run on a slower clock."""
    arrivals = poisson(40.0, 600)
    slow = [Arrival(2 * arrival.time, arrival.prompt, arrival.answer) for arrival in arrivals]
    once, twice = simulate(arrivals), simulate(slow, slower=2.0)
    assert twice.makespan == pytest.approx(2 * once.makespan)
    assert twice.first_token_after == pytest.approx([2 * after for after in once.first_token_after])


def test_a_batch_that_is_all_there_takes_twice_as_long_at_twice_the_price() -> None:
    at_once = [Arrival(0.0, arrival.prompt, arrival.answer) for arrival in poisson(40.0, 600)]
    assert simulate(at_once, slower=2.0).makespan == pytest.approx(2 * simulate(at_once).makespan)


def test_under_light_load_the_arrivals_set_the_pace_and_under_heavy_load_the_batch_does() -> None:
    heavy = simulate(poisson(10_000.0))
    last = poisson(20.0)[-1].time
    assert last < light_load().makespan < last + 1.0
    assert heavy.throughput > 1.5 * light_load().throughput
    assert heavy.throughput < MAX_NUM_SEQS / price(StepPlan(1, [], [], [], [], [], [])), "no faster than full batches"
    steps = light_load().mean_ttft / FIXED
    assert 1.0 < steps < 4.0, "a free engine answers within a few steps"
    assert heavy.mean_ttft > 50 * light_load().mean_ttft
    assert min(heavy.first_token_after + light_load().first_token_after) >= FIXED


def test_the_clock_moves_by_the_price_of_each_step_when_it_is_collected() -> None:
    prices: list[float] = []

    def record(plan: StepPlan) -> float:
        prices.append(price(plan))
        return prices[-1]

    runner = ModelledRunner(record)
    engine = Engine(Scheduler(Limits(2, 8, 64), BlockPool(16, 4)), runner, 1000)
    engine.add([1] * 20, SamplingParams(max_tokens=3))
    while engine.has_work:
        engine.step()
        check_books(engine.scheduler)
        assert runner.clock == pytest.approx(sum(prices))
    assert len(prices) == 5


def test_the_token_function_names_the_tokens() -> None:
    token: Callable[[int, int], int] = lambda slot, position: 100 * slot + position  # noqa: E731
    runner = ModelledRunner(price, token)
    engine = Engine(Scheduler(Limits(2, 64, 64), BlockPool(32, 4)), runner, 1000)
    one, two = (engine.add([1] * length, SamplingParams(max_tokens=3)) for length in (4, 6))
    while engine.has_work:
        engine.step()
    assert (one.output, two.output) == ([4, 5, 6], [106, 107, 108])
