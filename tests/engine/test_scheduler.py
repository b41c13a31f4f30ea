"""The scheduler by example: chunks, order, preemption, cancellation, and two steps in flight."""

from __future__ import annotations

import pytest

from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.request import Phase
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits, Scheduler
from phalanx.engine.step_plan import StepPlan
from phalanx.errors import ConfigError

from .books import answer_alone, check_answer, check_books, check_empty, greedy, make_engine, run

TEXT = [1 + index % 6 for index in range(60)]


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(slot, start, count) of each row."""
    return list(zip(plan.slots, plan.starts, plan.counts, strict=True))


def step_until(engine: Engine, tokens_read: int) -> None:
    """Step until the first request has this many tokens of its answer."""
    first = next(iter(engine.scheduler.requests.values()))
    while len(first.output) < tokens_read:
        engine.step()


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine, runner = make_engine(budget=16, max_model_len=64)
    request = engine.add(TEXT[:40], greedy(2))
    run(engine)
    assert [rows(plan) for plan in runner.plans] == [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 8)], [(0, 40, 1)]]
    assert [plan.samples for plan in runner.plans] == [[False], [False], [True], [True]]
    assert [len(plan.admissions) for plan in runner.plans] == [1, 0, 0, 0]
    check_answer(request, 64)


def test_an_admitted_request_gets_the_blocks_of_its_prompt_at_once_and_later_ones_as_it_grows() -> None:
    engine, runner = make_engine(budget=8, block_size=4, prefix_caching=False)
    engine.add(TEXT[:16], greedy(6))
    run(engine)
    added = [[(slot, len(blocks)) for slot, blocks in plan.new_blocks] for plan in runner.plans]
    assert added == [[(0, 4)], [], [(0, 1)], [], [], [], [(0, 1)]]


def test_decodes_are_not_delayed_by_a_long_prompt() -> None:
    engine, runner = make_engine(budget=8, max_model_len=64)
    short = engine.add(TEXT[:4], greedy(12))
    engine.step()
    long = engine.add(TEXT[10:50], greedy(2))
    for _ in range(6):
        before = len(short.output)
        engine.step()
        assert len(short.output) == before + 1
    assert [rows(plan) for plan in runner.plans[1:3]] == [[(0, 4, 1), (1, 0, 7)], [(0, 5, 1), (1, 7, 7)]]
    assert all(plan.num_tokens == 8 for plan in runner.plans[1:6]), "what the decodes leave of the budget is used"
    run(engine)
    check_answer(short, 64)
    check_answer(long, 64)


def test_several_prompts_share_one_budget_in_order_of_arrival() -> None:
    engine, runner = make_engine(budget=12, prefix_caching=False)
    for _ in range(3):
        engine.add(TEXT[:5], greedy(1))
    run(engine)
    assert rows(runner.plans[0]) == [(0, 0, 5), (1, 0, 5), (2, 0, 2)]
    assert rows(runner.plans[1]) == [(2, 2, 3)]


def test_single_tokens_of_long_sequences_come_first_and_prompts_last() -> None:
    engine, runner = make_engine(budget=32, max_model_len=64, prefix_caching=False)
    asked = [engine.add(TEXT[:length], greedy(3)) for length in (4, 12, 8)]
    engine.step()
    asked.append(engine.add(TEXT[:20], greedy(2)))
    run(engine)
    assert rows(runner.plans[1]) == [(1, 12, 1), (2, 8, 1), (0, 4, 1), (3, 0, 20)]
    for request in asked:
        check_answer(request, 64)


def test_a_request_that_does_not_fit_is_not_overtaken_by_a_smaller_one() -> None:
    engine, _ = make_engine(budget=64, block_size=4, num_blocks=8, max_model_len=32, prefix_caching=False)
    first, large, small = engine.add(TEXT[:16], greedy(4)), engine.add(TEXT[:20], greedy(1)), engine.add([1], greedy(1))
    engine.step()
    assert [request.phase for request in (first, large, small)] == [Phase.RUNNING, Phase.WAITING, Phase.WAITING]
    run(engine)
    for request in (first, large, small):
        check_answer(request, 32)


def test_no_more_run_at_once_than_max_num_seqs() -> None:
    engine, runner = make_engine(max_num_seqs=2, budget=64)
    requests = [engine.add(TEXT[:3], greedy(3, seed=seed)) for seed in range(5)]
    engine.step()
    assert [request.phase for request in requests] == [Phase.RUNNING] * 2 + [Phase.WAITING] * 3
    run(engine)
    assert max(len(plan.slots) for plan in runner.plans) == 2
    for request in requests:
        check_answer(request, 64)
    check_empty(engine.scheduler)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_takes_the_youngest_and_the_answers_stay_the_same(depth: int, prefix_caching: bool) -> None:
    engine, _ = make_engine(
        block_size=4, num_blocks=7, max_model_len=24, budget=32, depth=depth, prefix_caching=prefix_caching
    )
    requests = [engine.add(TEXT[length : 2 * length], greedy(12, seed=length)) for length in (6, 7, 5)]
    while not any(request.preemptions for request in requests):
        engine.step()
        check_books(engine.scheduler)
    assert [request.preemptions for request in requests] == [0, 0, 1], "the second takes the last block"
    assert engine.scheduler.waiting[0] is requests[2], "it is the next to run again"
    run(engine)
    assert requests[0].preemptions == 0, "the oldest is never preempted"
    for request in requests:
        check_answer(request, 24)
    check_empty(engine.scheduler)


def test_a_preempted_request_finds_its_blocks_in_the_prefix_cache_if_nobody_took_them() -> None:
    engine, runner = make_engine(block_size=4, num_blocks=6, max_model_len=20, budget=32)
    old, young = engine.add(TEXT[:7], greedy(4)), engine.add(TEXT[20:35], greedy(4))
    run(engine)
    assert young.preemptions == 1
    back = next(plan for plan in runner.plans[1:] if plan.admissions)
    assert back.starts[back.slots.index(back.admissions[0].slot)] == 12, "three of its four blocks were still there"
    assert young.cached_tokens == 0, "its first admission counts"
    check_answer(old, 20)
    check_answer(young, 20)


def test_equal_prompts_share_all_whole_blocks_but_compute_the_last_token() -> None:
    engine, runner = make_engine(block_size=4, budget=64)
    first = engine.add(TEXT[:12], greedy(2))
    run(engine)
    again, longer = engine.add(TEXT[:12], greedy(2)), engine.add(TEXT[:14], greedy(2))
    run(engine)
    assert (first.cached_tokens, again.cached_tokens, longer.cached_tokens) == (0, 8, 12)
    assert rows(runner.plans[2]) == [(0, 8, 4), (1, 12, 2)]
    assert again.output == first.output


@pytest.mark.parametrize("depth", [1, 2])
def test_the_answer_is_cached_too(depth: int) -> None:
    engine, _ = make_engine(block_size=4, depth=depth)
    first = engine.add(TEXT[:6], greedy(7))
    run(engine)
    second = engine.add([*first.tokens, 1], greedy(1))
    run(engine)
    assert second.cached_tokens == 12


@pytest.mark.parametrize(("salt", "other", "cached"), [("a", "a", 8), ("a", "b", 0), ("a", None, 0), (None, "a", 0)])
def test_prefixes_are_shared_within_a_salt_only(salt: str | None, other: str | None, cached: int) -> None:
    engine, _ = make_engine(block_size=4)
    engine.add(TEXT[:10], greedy(2), salt)
    run(engine)
    second = engine.add(TEXT[:10], greedy(2), other)
    run(engine)
    assert second.cached_tokens == cached


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("phase", ["waiting", "mid-prefill", "decoding", "preempted"])
def test_cancellation_frees_the_blocks_at_once_in_every_phase(phase: str, depth: int) -> None:
    blocks = 6 if phase == "preempted" else 8
    engine, _ = make_engine(num_blocks=blocks, max_model_len=24, budget=8, depth=depth, prefix_caching=False)
    if phase == "preempted":
        other = engine.add(TEXT[:7], greedy(16))
        request = engine.add(TEXT[:7], greedy(16))
        while not request.preemptions:
            engine.step()
        assert request.phase is Phase.WAITING
        assert not request.blocks
    else:
        other = engine.add(TEXT[:4], greedy(8))
        request = engine.add(TEXT[:20] if phase != "decoding" else TEXT[:8], greedy(8))
        step_until(engine, {"waiting": 0, "mid-prefill": 1, "decoding": 4}[phase])
        assert request.phase is (Phase.WAITING if phase == "waiting" else Phase.RUNNING)
        assert (0 < request.computed < 20) == (phase != "waiting")
        assert bool(request.output) == (phase == "decoding")
    assert engine.scheduler.in_flight == (0 if phase == "waiting" else depth - 1)
    read = len(request.output)
    assert engine.cancel(request.id)
    assert request.finish_reason == "cancelled"
    assert engine.scheduler.pool.available == blocks - len(other.blocks)
    check_books(engine.scheduler)
    assert not engine.cancel(request.id), "it is not known any more"
    outputs = run(engine)
    assert all(output.request_id == other.id for output in outputs)
    assert len(request.output) == read, "no token after the end"
    check_answer(other, 24)
    check_empty(engine.scheduler)


def test_cancelling_what_was_never_there_is_no_error() -> None:
    engine, _ = make_engine()
    assert not engine.cancel(99)


def test_a_slot_given_up_in_flight_serves_the_next_request() -> None:
    engine, _ = make_engine(max_num_seqs=1, depth=2, block_size=4, num_blocks=4, max_model_len=16)
    first, second = engine.add(TEXT[:5], greedy(8)), engine.add(TEXT[7:12], greedy(4))
    step_until(engine, 2)
    assert engine.scheduler.in_flight == 1
    engine.cancel(first.id)
    run(engine)
    check_answer(second, 16)


def test_depth_two_launches_the_next_step_before_the_last_is_read() -> None:
    engine, runner = make_engine(depth=2)
    request = engine.add(TEXT[:4], greedy(3))
    assert engine.step() == []
    assert runner.in_flight == 1
    assert request.pending == 1
    (output,) = engine.step()
    assert (len(runner.plans), runner.in_flight) == (2, 1)
    assert output.token == request.output[0]
    assert rows(runner.plans[1]) == [(0, 4, 1)], "computes the token that was not read yet"
    run(engine)
    assert len(runner.plans) == 3, "nothing is launched beyond max_tokens"
    check_answer(request, 64)


def test_depth_two_discards_the_token_computed_after_the_end() -> None:
    engine, runner = make_engine(depth=2)
    answer, _ = answer_alone(TEXT[:4], greedy(10), 64)
    stop = next(token for token in answer if token != answer[0])
    produced = answer.index(stop) + 1
    request = engine.add(TEXT[:4], SamplingParams(max_tokens=10, seed=0, ignore_eos=True, stop_token_ids=[stop]))
    outputs = run(engine)
    assert request.output == answer[:produced]
    assert request.finish_reason == "stop"
    assert [output.token for output in outputs] == request.output
    assert len(runner.plans) == produced + 1, "one step ran over the end"
    check_empty(engine.scheduler)


def test_a_context_larger_than_the_pool_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError) as error:
        Scheduler(Limits(4, 64, max_model_len=33), BlockPool(num_blocks=8, block_size=4))
    assert error.value.code == "kv_too_small"
    assert "32 tokens" in error.value.found
    assert "33" in error.value.found
    assert "max_model_len to 32" in error.value.fix
    Scheduler(Limits(4, 64, max_model_len=32), BlockPool(num_blocks=8, block_size=4))


@pytest.mark.parametrize("limits", [Limits(0, 64, 32), Limits(4, 0, 32), Limits(-1, 64, 32)])
def test_limits_under_which_nothing_can_ever_run_are_refused(limits: Limits) -> None:
    with pytest.raises(ConfigError):
        Scheduler(limits, BlockPool(num_blocks=8, block_size=4))
