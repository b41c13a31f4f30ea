"""A lower number of `priority` is served first; among equals, who came first."""

from __future__ import annotations

import pytest

from phalanx.engine.request import Phase
from phalanx.engine.sampling import SamplingParams

from .books import check_answer, check_empty, make_engine, run

TEXT = [1 + index % 6 for index in range(60)]


def asked(priority: int, max_tokens: int = 3, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, priority=priority)


def test_requests_are_admitted_by_priority_then_by_arrival() -> None:
    engine, runner = make_engine(max_num_seqs=1)
    priorities = [0, 5, -1, 0, -1]
    requests = [engine.add(TEXT[:4], asked(priority, seed=index)) for index, priority in enumerate(priorities)]
    run(engine)
    admitted = [admission.seed for plan in runner.plans for admission in plan.admissions]
    assert admitted == [2, 4, 0, 3, 1]
    for request in requests:
        check_answer(request, 64)


def test_who_runs_already_is_not_sent_away_for_a_better_priority() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    first = engine.add(TEXT[:4], asked(9, max_tokens=6))
    engine.step()
    better = engine.add(TEXT[:4], asked(-9))
    engine.step()
    assert (first.phase, better.phase) == (Phase.RUNNING, Phase.WAITING)
    run(engine)
    assert first.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_the_worst_priority_gives_up_its_blocks_first_and_comes_back_last(depth: int) -> None:
    engine, _ = make_engine(block_size=4, num_blocks=8, max_model_len=24, budget=32, depth=depth, prefix_caching=False)
    requests = [engine.add(TEXT[:6], asked(priority, 16, priority)) for priority in (2, 1, 0)]
    while not any(request.preemptions for request in requests):
        engine.step()
    assert [request.preemptions for request in requests] == [1, 0, 0], "the first to come is the last in order"
    later = engine.add(TEXT[:6], asked(2, 1, seed=7))
    assert engine.scheduler.waiting == [requests[0], later], "among equals it came first"
    run(engine)
    assert requests[2].preemptions == 0
    for request in (*requests, later):
        check_answer(request, 24)
    check_empty(engine.scheduler)
