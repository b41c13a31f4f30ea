"""A long prompt leaves a part of every step to shorter ones, and loses no more than that part."""

from __future__ import annotations

import random
from itertools import count

import pytest

from phalanx.engine import passing
from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.modelled import ModelledRunner
from phalanx.engine.request import Phase, Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits, Scheduler

from .books import check_answer, check_books, check_empty, greedy, make_engine, run

BUDGET = 2048
BUDGETS = [512, 2048, 8192]
LONG, SHORT = 100_000, 200
TEXT = [1 + index % 6 for index in range(60)]


class Server:
    """An engine in virtual time, with requests that decode all the while."""

    def __init__(self, decodes: int = 0, depth: int = 2, num_blocks: int = 40_000, budget: int = BUDGET) -> None:
        self.runner = ModelledRunner(lambda plan: 0.008 + 0.00005 * plan.num_tokens, depth=depth)
        limits = Limits(max_num_seqs=1100, max_num_batched_tokens=budget, max_model_len=131_072)
        self.engine = Engine(Scheduler(limits, BlockPool(num_blocks, 16)), self.runner, 1000)
        self.first: dict[int, float] = {}
        self._numbers = count()
        for _ in range(decodes):
            self.send(1, answer=10_000)
        while self.engine.scheduler.waiting:
            self.step()

    def send(self, length: int, answer: int = 1, priority: int = 0) -> Request:
        """No two prompts begin alike."""
        number = next(self._numbers)
        prompt = [number % 1000, number // 1000, *[7] * length][:length]
        return self.engine.add(prompt, SamplingParams(max_tokens=answer, seed=0, priority=priority))

    def step(self) -> None:
        for output in self.engine.step():
            self.first.setdefault(output.request_id, self.runner.clock)

    def steps_to_first_token(self, request: Request) -> int:
        for steps in range(1, 200):
            self.step()
            if request.id in self.first:
                return steps
        raise AssertionError("no token in 200 steps")

    def finish_prompt(self, request: Request) -> float:
        while request.id not in self.first:
            self.step()
        return self.first[request.id]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("budget", "decodes"), [(512, 0), (512, 64), (2048, 0), (2048, 64), (2048, 1000), (8192, 64)])
@pytest.mark.parametrize(("others", "after"), [(1, 0), (1, 5), (4, 5)])
def test_a_short_prompt_has_its_first_token_within_three_steps(
    depth: int, budget: int, decodes: int, others: int, after: int
) -> None:
    """Whether one long prompt has just begun or is being computed, or more of them wait ahead of the short one."""
    server = Server(decodes, depth, budget=budget)
    long = [server.send(LONG) for _ in range(others)]
    for _ in range(1 + after):
        server.step()
    assert server.steps_to_first_token(server.send(SHORT)) <= 3
    assert long[0].id not in server.first


def nobody_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "SHARE", 0)
    monkeypatch.setattr(passing, "OWED_AT_FIRST", 0)


def test_without_the_part_left_to_them_short_prompts_wait_for_the_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_passes(monkeypatch)
    server = Server()
    server.send(LONG)
    server.step()
    assert server.steps_to_first_token(server.send(SHORT)) > LONG / BUDGET


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("most", "answer"), [(30, 1), (1, 2)])
def test_the_long_prompt_loses_at_most_a_tenth_to_the_prompts_that_pass(
    budget: int, most: int, answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than can pass, or so few that their answers fit into the same tenth."""

    def seconds() -> float:
        server, draw = Server(decodes=32, budget=budget), random.Random(3)
        long, began = server.send(LONG), server.runner.clock
        while long.id not in server.first:
            for _ in range(draw.randint(0, most)):
                server.send(draw.randint(50, 400), answer)
            server.step()
        return server.first[long.id] - began

    with_others = seconds()
    nobody_passes(monkeypatch)
    alone = seconds()
    assert alone < with_others <= 1.1 * alone


def test_where_nobody_passes_the_long_prompt_has_all_that_the_decodes_leave() -> None:
    engine, runner = make_engine(budget=20, max_model_len=64)
    engine.add(TEXT[:2], greedy(20))
    engine.step()
    engine.add(TEXT[:50], greedy(1))
    engine.add(TEXT[1:55], greedy(1))
    for _ in range(3):
        engine.step()
    assert [plan.counts for plan in runner.plans[1:]] == [[1, 19], [1, 19], [1, 12, 7]]
    run(engine)


def test_short_prompts_pass_long_ones_in_their_order_and_in_chunks() -> None:
    engine, runner = make_engine(budget=20, max_num_seqs=6, max_model_len=64, num_blocks=100, prefix_caching=False)
    long, longer = engine.add(TEXT[:60], greedy(2)), engine.add(TEXT[:61], greedy(2, seed=1))
    engine.step()
    short = [engine.add(TEXT[:length], greedy(2, seed=length)) for length in (3, 2)]
    engine.step()
    assert longer.phase is Phase.WAITING, "one long prompt at a time"
    for _ in range(2):
        engine.step()
    assert [(plan.slots, plan.counts) for plan in runner.plans] == [
        ([0], [20]),
        ([1, 0], [1, 19]),
        ([1, 0], [2, 18]),
        ([1, 0, 2], [1, 3, 16]),
    ]
    assert longer.phase is Phase.RUNNING, "the end of the first one is not long any more"
    run(engine)
    for request in (long, longer, *short):
        check_answer(request, 64)
    check_empty(engine.scheduler)


def test_nobody_passes_a_better_priority() -> None:
    engine, _ = make_engine(budget=20, max_num_seqs=4, max_model_len=64, num_blocks=100, prefix_caching=False)
    engine.add(TEXT[:60], greedy(2))
    engine.step()
    important = engine.add(TEXT[:61], SamplingParams(max_tokens=1, priority=-1))
    short = engine.add(TEXT[:2], greedy(1))
    engine.step()
    assert (important.phase, short.phase) == (Phase.WAITING, Phase.WAITING)
    run(engine)


def test_a_long_prompt_that_is_mostly_cached_passes_like_a_short_one() -> None:
    server = Server()
    first = server.send(LONG)
    server.finish_prompt(first)
    server.send(LONG)
    server.step()
    again = server.engine.add([*first.tokens, 5], SamplingParams(max_tokens=1))
    assert server.steps_to_first_token(again) <= 3


def test_long_prompts_come_to_their_turn_however_many_short_ones_pass() -> None:
    """A pool too small for both long prompts at once: short ones do not keep the second one out."""
    server = Server(num_blocks=10_000)
    long = [server.send(LONG, answer=50) for _ in range(2)]
    ends = 2.2 * server.runner.clock + 2.5 * LONG / BUDGET * (0.008 + 0.00005 * BUDGET)
    draw = random.Random(1)
    while any(request.id not in server.first for request in long):
        server.send(draw.randint(50, 400), answer=30)
        server.step()
        assert server.runner.clock < ends, "the second long prompt starves"
    check_books(server.engine.scheduler)
