"""A step that runs out of memory ends its youngest request, and nobody else notices but by waiting longer."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from phalanx.engine import core
from phalanx.engine.blocks import BlockPool
from phalanx.engine.caches import CacheLayout
from phalanx.engine.core import SHORT_AGAIN_S, Engine
from phalanx.engine.scheduler import NO_TOKEN, Limits, Scheduler
from phalanx.engine.step_plan import StepPlan
from phalanx.errors import EngineDeadError, StepMemoryError

from .books import EOS, VOCAB, ToyMatcher, answer_alone, check_answer, check_books, check_empty, greedy, run
from .checking_runner import CheckingRunner

SPOILT = -1


class ShortRunner(CheckingRunner):
    """Has no memory for some steps, by their number. What such a step would have written is spoilt, not left alone."""

    short: Callable[[int], bool] = staticmethod(lambda step: False)
    closed = False

    def launch(self, plan: StepPlan) -> None:
        if not self.short(plan.step):
            super().launch(plan)
            return
        rows = self._rows(plan)
        self._admit(plan.admissions, rows)
        self._extend(plan.new_blocks, plan.window_blocks)
        for row in rows:
            slot = self.slots[row.slot]
            for group in range(len(self.reaches)):
                for position in range(row.start, row.end):
                    place = self._place(slot, position, group)
                    for kept in self._kv:
                        kept[place] = SPOILT
        self.states |= dict.fromkeys([row.slot for row in rows] + [place for _, place in plan.saved], ())
        self.plans.append(plan)
        raise StepMemoryError("out_of_memory", f"Step {plan.step} ran out of memory on rank 0.", "Lower a limit.")

    def close(self) -> None:
        self.closed = True


def make_engine(
    short: Callable[[int], bool],
    *,
    depth: int,
    budget: int = 16,
    num_blocks: int = 64,
    layout: CacheLayout | None = None,
) -> tuple[Engine, ShortRunner]:
    limits = Limits(4, budget, 64)
    runner = ShortRunner(limits, num_blocks, 4, VOCAB, depth, layout=layout)
    runner.short = short
    return Engine(Scheduler(limits, BlockPool(num_blocks, 4), (EOS,), layout), runner, VOCAB), runner


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time as the engine sees it: the one number in the list."""
    now = [100.0]
    monkeypatch.setattr(core.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_the_youngest_ends_with_the_cause_and_the_others_get_their_answers(depth: int, step: int) -> None:
    engine, _ = make_engine(lambda number: number == step, depth=depth)
    oldest, middle, youngest = (engine.add([2, 3, number] * 4, greedy(12, seed=number)) for number in range(3))
    outputs = run(engine)
    in_step = youngest if step > 1 else middle  # 16 tokens a step: the third prompt is not in the first one
    ended = [output for output in outputs if output.finish_reason == "error"]
    assert [(output.request_id, output.token) for output in ended] == [(in_step.id, NO_TOKEN)]
    assert in_step.error is not None
    assert in_step.error.code == "out_of_memory"
    assert "the youngest" in in_step.error.found
    for request in {oldest, middle, youngest} - {in_step}:
        check_answer(request, 64)
        assert request.error is None
    check_empty(engine.scheduler)


@pytest.mark.parametrize("depth", [1, 2])
def test_whatever_steps_fail_no_answer_is_spoilt(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks, shared prefixes, requests that come and go: each ends with its own tokens or with the cause."""
    monkeypatch.setattr(core, "SHORT_AGAIN_S", 0.0)
    for seed in range(30):
        rng = random.Random(seed)
        failing = {number for number in range(1, 400) if rng.random() < 0.08}
        engine, _ = make_engine(failing.__contains__, depth=depth, num_blocks=24)
        shared = [rng.randrange(1, VOCAB) for _ in range(12)]
        requests = []
        while len(requests) < 12 or engine.has_work:
            if len(requests) < 12 and rng.random() < 0.4:
                prompt = shared[: rng.randrange(13)] + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 9))]
                requests.append(engine.add(prompt, greedy(rng.randrange(1, 20), seed=rng.randrange(9))))
            engine.step()
            check_books(engine.scheduler)
        for request in requests:
            if request.error is None:
                check_answer(request, 64)
        assert any(request.error is None for request in requests)
        check_empty(engine.scheduler)


def test_a_prefix_that_was_never_computed_is_not_found() -> None:
    """The first step would have filled blocks of a prompt that the next request begins with too."""
    engine, _ = make_engine(lambda number: number == 1, depth=1)
    first = engine.add([1, 2, 3, 4, 5, 6, 1, 2, 3], greedy(2))
    run(engine)
    assert first.error is not None
    second = engine.add([1, 2, 3, 4, 5, 6, 1, 2, 3], greedy(2))
    run(engine)
    assert second.cached_tokens == 0
    check_answer(second, 64)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_masks_that_may_have_been_lost_travel_again(step: int) -> None:
    engine, _ = make_engine(lambda number: number == step, depth=1)
    constrained = engine.add([2, 3, 4], greedy(None), matcher=ToyMatcher(9))
    engine.add([5, 5], greedy(9))
    run(engine)
    answer = answer_alone([2, 3, 4], greedy(None), 64, matcher=ToyMatcher(9))
    assert (constrained.output, constrained.finish_reason) == answer


def test_a_prefix_from_before_is_kept() -> None:
    engine, runner = make_engine(lambda number: False, depth=1)
    first = engine.add([1, 2, 3, 4, 5, 6, 1, 2, 3], greedy(9))
    engine.step()
    engine.step()
    runner.short = lambda number: number == 3
    engine.add([5], greedy(1))
    run(engine)
    computed_again = next(plan for plan in runner.plans if plan.step == 4)
    assert computed_again.starts == [8], "two whole blocks were sure"
    check_answer(first, 64)


def test_a_second_time_within_a_minute_ends_the_engine_with_the_cause(clock: list[float]) -> None:
    engine, runner = make_engine(lambda number: number in (2, 4), depth=1)
    for number in range(3):
        engine.add([2, 3, number], greedy(8))
    for _ in range(3):
        engine.step()
    clock[0] += SHORT_AGAIN_S - 1
    with pytest.raises(EngineDeadError, match="Step 4 ran out of memory on rank 0") as caught:
        engine.step()
    assert (caught.value.code, caught.value.fix) == ("out_of_memory", "Lower a limit.")
    assert runner.closed


def test_a_second_time_later_ends_another_request(clock: list[float]) -> None:
    engine, _ = make_engine(lambda number: number in (2, 4), depth=1)
    requests = [engine.add([2, 3, number], greedy(8)) for number in range(3)]
    for _ in range(3):
        engine.step()
    clock[0] += SHORT_AGAIN_S
    run(engine)
    assert [request.error is not None for request in requests] == [False, True, True]


def test_the_whole_cause_is_logged_for_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = make_engine(lambda number: number == 1, depth=1)
    request = engine.add([1], greedy(1))
    run(engine)
    assert f"Step 1 ran out of memory on rank 0. Lower a limit. Request {request.id} was ended." in caplog.text
