"""Requests under a grammar: each token is chosen knowing the one before it, and nobody else waits for that."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.engine.request import Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import StepPlan

from .books import VOCAB, ToyMatcher, answer_alone, check_answer, check_empty, greedy, make_engine, run

PROMPT = [1, 2, 3, 4, 5]
CONTEXT = 64


def expected(length: int, params: SamplingParams, prompt: list[int] = PROMPT) -> tuple[list[int], str]:
    return answer_alone(prompt, params, CONTEXT, VOCAB, ToyMatcher(length))


def outcome(request: Request) -> tuple[list[int], str | None]:
    return request.output, request.finish_reason


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_token_is_one_the_grammar_allows_and_its_end_is_the_end(depth: int) -> None:
    engine, runner = make_engine(depth=depth)
    request = engine.add(PROMPT, greedy(None), matcher=ToyMatcher(9))
    outputs = run(engine)
    assert outcome(request) == expected(9, greedy(None))
    assert (len(request.output), request.finish_reason) == (9, "stop")
    assert [output.finish_reason for output in outputs] == [None] * 8 + ["stop"]
    assert len(runner.plans) == 9, "no step beyond the end"
    check_empty(engine.scheduler)


def test_the_grammar_changes_the_answer() -> None:
    free, _ = answer_alone(PROMPT, greedy(9), CONTEXT)
    assert free != expected(9, greedy(9))[0]


def test_others_run_two_deep_while_a_constrained_request_waits_for_its_token() -> None:
    engine, runner = make_engine(depth=2)
    free, constrained = engine.add(PROMPT, greedy(12)), engine.add([6, 5, 4], greedy(None), matcher=ToyMatcher(5))
    run(engine)
    assert [len(plan.slots) for plan in runner.plans] == [2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 1, 1]
    assert [len(plan.masks) for plan in runner.plans[:10]] == [1, 0] * 5
    check_answer(free, CONTEXT)
    assert outcome(constrained) == expected(5, greedy(None), [6, 5, 4])


def test_a_long_prompt_under_a_grammar_is_computed_in_chunks_two_deep_and_only_the_last_has_a_mask() -> None:
    engine, runner = make_engine(depth=2, budget=8)
    prompt = [1 + index % 6 for index in range(30)]
    request = engine.add(prompt, greedy(None), matcher=ToyMatcher(3))
    for _ in range(2):
        engine.step()
    assert [plan.counts for plan in runner.plans] == [[8], [8]], "the second chunk is launched before the first is read"
    run(engine)
    assert [len(plan.masks) for plan in runner.plans] == [0, 0, 0, 1, 1, 1]
    assert outcome(request) == expected(3, greedy(None), prompt)


def test_a_mask_names_the_token_it_is_for() -> None:
    """Rows of one token come first: the beginning of another prompt, cut to what is left of the budget."""
    engine, runner = make_engine(budget=6, prefix_caching=False)
    request = engine.add(PROMPT, greedy(None), matcher=ToyMatcher(3))
    engine.add([6, 5, 4, 3], greedy(2))
    run(engine)
    assert (runner.plans[0].counts, runner.plans[0].samples) == ([1, 5], [False, True])
    assert [index for index, _ in runner.plans[0].masks] == [0], "the only token of the step"
    assert outcome(request) == expected(3, greedy(None))


def test_preemption_computes_again_but_accepts_nothing_twice() -> None:
    engine, _ = make_engine(depth=2, num_blocks=16, block_size=4, max_model_len=CONTEXT, prefix_caching=False)
    requests = [
        engine.add([index + 1] * 5, greedy(None, seed=index), matcher=ToyMatcher(40 + index)) for index in range(3)
    ]
    run(engine)
    assert sum(request.preemptions for request in requests) > 0
    for index, request in enumerate(requests):
        assert outcome(request) == expected(40 + index, greedy(None, seed=index), [index + 1] * 5)
        assert isinstance(request.matcher, ToyMatcher)
        assert request.matcher.accepted == request.output


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_request_takes_no_more_tokens(steps: int) -> None:
    engine, _ = make_engine(depth=2)
    request = engine.add(PROMPT, greedy(None), matcher=ToyMatcher(30))
    for _ in range(steps):
        engine.step()
    read = list(request.output)
    assert engine.cancel(request.id)
    assert run(engine) == []
    assert isinstance(request.matcher, ToyMatcher)
    assert request.matcher.accepted == request.output == read
    check_empty(engine.scheduler)


def test_a_complete_grammar_ends_the_answer_under_ignore_eos_and_before_min_tokens() -> None:
    engine, _ = make_engine()
    params = SamplingParams(max_tokens=20, min_tokens=15, ignore_eos=True, seed=0)
    request = engine.add(PROMPT, params, matcher=ToyMatcher(4))
    run(engine)
    assert (len(request.output), request.finish_reason) == (4, "stop")


def test_an_unfinished_grammar_ends_by_length() -> None:
    engine, _ = make_engine()
    request = engine.add(PROMPT, greedy(3), matcher=ToyMatcher(4))
    run(engine)
    assert (len(request.output), request.finish_reason) == (3, "length")
    complete = engine.add(PROMPT, greedy(4), matcher=ToyMatcher(4))
    run(engine)
    assert (len(complete.output), complete.finish_reason) == (4, "stop"), "complete in the last token it may have"


def test_a_grammar_that_cannot_go_on_ends_its_own_request_with_its_error() -> None:
    engine, _ = make_engine(depth=2)
    neighbour = engine.add([6, 5, 4], greedy(20))
    failing = engine.add(PROMPT, greedy(None), matcher=ToyMatcher(30, fails_at=4))
    outputs = run(engine)
    assert (len(failing.output), failing.finish_reason) == (4, "error")
    assert failing.error is not None
    assert failing.error.code == "toy_failure"
    assert [output.finish_reason for output in outputs if output.request_id == failing.id] == [None] * 3 + ["error"]
    check_answer(neighbour, CONTEXT)
    check_empty(engine.scheduler)


def test_steps_without_a_grammar_carry_nothing_for_it() -> None:
    engine, runner = make_engine()
    engine.add(PROMPT, greedy(2))
    run(engine)
    assert all(plan.masks == [] for plan in runner.plans)
    with_masks = msgspec.structs.replace(runner.plans[0], masks=[(0, 5)], new_masks=[(5, b"\x07")])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(with_masks), type=StepPlan) == with_masks
