"""Steps that nobody asked for stay within the limits, and reach them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.step_plan import StepPlan
from phalanx.runtime.rehearsal import everything, sweep, varied_steps, worst_step

VOCAB = 100
limits = st.tuples(st.integers(1, 70), st.integers(1, 700), st.integers(1, 300))


def check(plan: StepPlan, seats: int, tokens: int, longest: int) -> None:
    assert 0 < len(plan.slots) <= seats
    assert 0 < plan.num_tokens <= tokens
    assert sorted(plan.slots) == list(range(len(plan.slots)))
    assert [admission.slot for admission in plan.admissions] == plan.slots
    singles = [count == 1 for count in plan.counts]
    assert singles == sorted(singles, reverse=True), "rows of one token come first"
    for start, count in zip(plan.starts, plan.counts, strict=True):
        assert 0 <= start < start + count <= longest


@given(limits)
def test_the_worst_step_is_as_full_as_a_step_can_be(limit: tuple[int, int, int]) -> None:
    seats, tokens, longest = limit
    plan = worst_step(seats, tokens, longest, VOCAB)
    check(plan, *limit)
    assert len(plan.slots) == min(seats, tokens)
    assert plan.num_tokens == min(tokens, seats * longest)
    assert all(start + count == longest for start, count in zip(plan.starts, plan.counts, strict=True))
    assert [index for index, _ in plan.masks] == list(range(len(plan.slots)))


@given(limits)
def test_varied_steps_stay_within_the_limits_and_reach_them(limit: tuple[int, int, int]) -> None:
    seats, tokens, longest = limit
    plans = varied_steps(seats, tokens, longest, VOCAB)
    for plan in plans:
        check(plan, *limit)
    prompts = [plan for plan in plans if max(plan.counts) > 1]
    if min(tokens, longest) > 1:
        assert max(plan.num_tokens for plan in prompts) >= min(tokens, longest)
        assert max(len(plan.slots) for plan in prompts) == max(1, min(seats, tokens - 1))
        assert {plan.starts[-1] == 0 for plan in prompts} >= {True}
    if min(tokens, longest) > 1 and longest > 2:
        assert any(plan.starts[-1] > 0 for plan in prompts), "a prompt that goes on"


@given(st.integers(1, 20_000))
def test_sizes_at_most_double(most: int) -> None:
    sizes = sweep(most)
    assert (sizes[0], sizes[-1]) == (1, most)
    assert all(small < large <= 2 * small for small, large in itertools.pairwise(sizes))


def test_everything_is_asked_of_the_sampler() -> None:
    """Whatever the sampler has a branch for."""
    asked = everything(VOCAB)
    assert asked.penalised
    assert asked.logit_bias
    assert asked.logprobs == 20
    assert everything(5).logprobs == 5
    assert asked.temperature > 0
    assert asked.top_p < 1
    assert asked.min_p > 0
    assert asked.min_tokens > 10**6
