"""Counting steps instead of scheduling every row gives the same steps, moment for moment."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.cost.rules import AdmissionRule, Rules
from phalanx.engine.step_sums import StepSums
from phalanx.plan.counted import CountedBatch
from phalanx.plan.scheduled import ScheduledBatch
from phalanx.plan.simulate import Trace, _Simulation
from phalanx.spec.workload import Workload

admissions = st.sampled_from(["fair", "mixed", "whole", "first"])


def price(step: StepSums) -> float:
    return 0.01 + 1e-4 * step.prompt_tokens + 1e-3 * step.decodes + 1e-6 * step.context


def run(batch: type, workload: Workload, rules: Rules, kv_tokens: int | None) -> Trace:
    simulation = _Simulation(workload, rules, kv_tokens, price)
    simulation.batch = batch(workload, rules, kv_tokens)
    return simulation.run()


def check(workload: Workload, rules: Rules, kv_tokens: int | None) -> Trace:
    """Both ways; the very same trace."""
    scheduled, counted = (run(batch, workload, rules, kv_tokens) for batch in (ScheduledBatch, CountedBatch))
    assert counted.steps == scheduled.steps
    assert counted == scheduled
    return counted


@st.composite
def closed_loops(draw: st.DrawFn) -> Workload:
    return Workload(
        input_tokens=draw(st.integers(1, 120)),
        output_tokens=draw(st.integers(1, 80)),
        concurrency=draw(st.integers(1, 14)),
        spread=draw(st.sampled_from([0.0, 0.2, 0.9])),
        requests=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 5)),
    )


@settings(max_examples=80, deadline=None)
@given(closed_loops(), admissions, st.integers(3, 200), st.none() | st.integers(64, 1200))
def test_closed_loops(workload: Workload, admission: AdmissionRule, step_tokens: int, kv_tokens: int | None) -> None:
    rules = Rules(admission, step_tokens)
    assume(CountedBatch.covers(workload, rules, kv_tokens))
    check(workload, rules, kv_tokens)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(2, 120), st.integers(1, 80)), min_size=1, max_size=24),
    admissions,
    st.integers(20, 200),
    st.none() | st.integers(64, 1200),
)
def test_arrivals_by_the_clock(
    trace: list[tuple[float, int, int]], admission: AdmissionRule, step_tokens: int, kv_tokens: int | None
) -> None:
    check(Workload(trace=tuple(trace)), Rules(admission, step_tokens, max_sequences=16), kv_tokens)


@pytest.mark.parametrize("admission", ["fair", "mixed", "whole", "first"])
@pytest.mark.parametrize(("clients", "kv_tokens"), [(12, 700), (60, 4800)])
def test_sequences_that_give_up_their_blocks(admission: AdmissionRule, clients: int, kv_tokens: int) -> None:
    """A cache too short for what was admitted: the youngest are computed again. A large one keeps some blocks free."""
    workload = Workload(40, 200, clients, spread=0.3, requests=5 * clients)
    trace = check(workload, Rules(admission, 64, kv_reserve=0.0), kv_tokens)
    assert trace.preemptions > 10


def test_a_cache_that_never_runs_out_admits_everyone_at_once() -> None:
    """Whatever admissions leave free."""
    workload = Workload(206, 1, 200, requests=200)
    trace = check(workload, Rules("mixed", 50_000, max_sequences=200), None)
    assert [step.prompts for step in trace.steps] == [200]


@settings(max_examples=15, deadline=None)
@given(st.integers(17, 400), st.integers(1, 6), admissions, st.sampled_from([None, 40_000]))
def test_prefixes_that_prompts_share(prefix: int, agents: int, admission: AdmissionRule, kv_tokens: int | None) -> None:
    """Found as often as the scheduler's own cache finds them, and requests pass as they do there."""
    workload = Workload(
        440, 60, 12, spread=0.2 if prefix < 350 else 0.05, requests=96, shared_prefix=prefix, agents=agents
    )
    rules = Rules(admission, 1024)
    assert CountedBatch.covers(workload, rules, kv_tokens)
    scheduled, counted = (run(batch, workload, rules, kv_tokens) for batch in (ScheduledBatch, CountedBatch))
    assert counted.cached_tokens == pytest.approx(scheduled.cached_tokens, rel=0.03)
    ours, theirs = counted.times(price), scheduled.times(price)
    assert ours.mean_ttft == pytest.approx(theirs.mean_ttft, rel=0.05)
    assert ours.mean_tpot == pytest.approx(theirs.mean_tpot, rel=0.03)


def test_what_is_left_to_the_scheduler() -> None:
    """Steps without room for every decode, and prefixes that would push each other out of the cache."""
    assert CountedBatch.covers(Workload(64, 8, 4), Rules("mixed", 6), None)
    assert not CountedBatch.covers(Workload(64, 8, 4), Rules("mixed", 5), None)
    assert CountedBatch.covers(Workload(64, 8, 4, shared_prefix=32), Rules(), None)
    assert not CountedBatch.covers(Workload(64, 8, 4, shared_prefix=32, agents=100), Rules(), 6000)
