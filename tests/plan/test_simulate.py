"""The real scheduler in virtual time: nothing is lost, rules are kept, and shortcuts change no result."""

from __future__ import annotations

from statistics import fmean

import pytest

from phalanx.cost.rules import AdmissionRule, Rules
from phalanx.engine.step_sums import StepSums
from phalanx.plan import simulate as simulation
from phalanx.plan.simulate import Trace, simulate
from phalanx.spec.workload import Workload

ADMISSIONS: list[AdmissionRule] = ["mixed", "whole", "first"]
LOAD = Workload(input_tokens=300, output_tokens=40, concurrency=6, spread=0.2, requests=30)


def price(step: StepSums) -> float:
    return 0.01 + 1e-4 * step.prompt_tokens + 1e-3 * step.decodes + 1e-6 * step.context


@pytest.fixture
def no_leaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation._Simulation, "_leap", lambda self: None)


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_every_token_is_computed_once(admission: AdmissionRule) -> None:
    trace = simulate(LOAD, Rules(admission, 512))
    lengths = [(prompt, output) for _, prompt, output in LOAD.lengths()]
    assert [(passage.input_tokens, passage.output_tokens) for passage in trace.passages] == lengths
    assert sum(step.prompt_tokens for step in trace.steps) == sum(prompt for prompt, _ in lengths)
    decoded = sum(step.decodes * repeats for step, repeats in zip(trace.steps, trace.repeats, strict=True))
    assert decoded == sum(output - 1 for _, output in lengths)
    context = sum(step.context * repeats for step, repeats in zip(trace.steps, trace.repeats, strict=True))
    assert context == pytest.approx(sum(prompt + token for prompt, output in lengths for token in range(1, output)))


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_leaps_change_nothing(admission: AdmissionRule, request: pytest.FixtureRequest) -> None:
    leapt = simulate(LOAD, Rules(admission, 512)).times(price)
    request.getfixturevalue("no_leaps")
    walked_trace = simulate(LOAD, Rules(admission, 512))
    walked = walked_trace.times(price)
    assert all(repeats == 1 for repeats in walked_trace.repeats)
    assert leapt.ttft == pytest.approx(walked.ttft)
    assert leapt.tpot == pytest.approx(walked.tpot)
    assert leapt.seconds == pytest.approx(walked.seconds)


@pytest.mark.parametrize("rate", [0.5, 5.0])
def test_leaps_change_little_when_requests_arrive_by_the_clock(rate: float, request: pytest.FixtureRequest) -> None:
    load = Workload(300, 40, spread=0.2, requests=30, rate=rate)
    leapt = simulate(load, Rules(), price=price).times(price)
    request.getfixturevalue("no_leaps")
    walked = simulate(load, Rules(), price=price).times(price)
    assert leapt.mean_ttft == pytest.approx(walked.mean_ttft, rel=0.02)
    assert leapt.mean_tpot == pytest.approx(walked.mean_tpot, rel=0.02)
    assert leapt.seconds == pytest.approx(walked.seconds, rel=0.01)


def test_waves_that_are_left_out_are_stood_for(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Workload(512, 64, 32, spread=0.2)
    short = simulate(load, Rules()).times(price)
    monkeypatch.setattr(simulation, "_FEWEST_WAVES", 10)
    whole = simulate(load, Rules()).times(price)
    assert len(short.ttft) < len(whole.ttft) == 320
    assert short.mean_ttft == pytest.approx(whole.mean_ttft, rel=0.2)
    assert short.mean_tpot == pytest.approx(whole.mean_tpot, rel=0.1)


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_weights_of_steps_give_the_same_means(admission: AdmissionRule) -> None:
    trace = simulate(LOAD, Rules(admission, 512))
    ttft, tpot = trace.step_weights()
    times = trace.times(price)
    prices = [price(step) for step in trace.steps]
    assert sum(weight * cost for weight, cost in zip(ttft, prices, strict=True)) == pytest.approx(times.mean_ttft)
    assert sum(weight * cost for weight, cost in zip(tpot, prices, strict=True)) == pytest.approx(times.mean_tpot)


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_no_step_is_over_its_budget(admission: AdmissionRule) -> None:
    trace = simulate(LOAD, Rules(admission, 400))
    assert max(step.tokens for step in trace.steps) <= 400


def test_mixed_steps_chunk_prompts_beside_decodes() -> None:
    trace = simulate(LOAD, Rules("mixed", 128))
    assert any(step.decodes and step.prompt_tokens for step in trace.steps)
    assert sum(step.prompts for step in trace.steps) > 2 * len(trace.passages)


def test_whole_prompts_are_not_cut() -> None:
    trace = simulate(LOAD, Rules("whole", 400))
    assert any(step.decodes and step.prompt_tokens for step in trace.steps)
    assert sum(step.prompts for step in trace.steps) == len(trace.passages)


def test_a_prompt_too_long_for_any_step_still_runs() -> None:
    trace = simulate(Workload(1000, 8, 2, requests=4), Rules("whole", 400))
    assert len(trace.passages) == 4
    assert all(passage.last > 0 for passage in trace.passages)


def test_prompts_first_never_mixes_and_leaves_no_prompt_waiting() -> None:
    trace = simulate(Workload(300, 40, 6, requests=24), Rules("first", 512))
    assert not any(step.decodes and step.prompt_tokens for step in trace.steps)
    mixed = simulate(Workload(300, 40, 6, requests=24), Rules("mixed", 512))
    assert trace.times(price).mean_tpot < mixed.times(price).mean_tpot


def test_a_new_prompt_misses_the_step_that_starts_when_it_is_sent() -> None:
    load = Workload(10, 5, 2, requests=4)
    trace = simulate(load, Rules())
    third = trace.passages[2]
    assert third.sent == trace.passages[0].last
    assert third.first - third.sent == 2


def test_a_short_cache_holds_fewer_sequences() -> None:
    load = Workload(300, 100, 8, requests=24)
    roomy, tight = simulate(load, Rules()), simulate(load, Rules(), kv_tokens=1200)
    assert max(step.decodes for step in roomy.steps) == 8
    assert max(step.decodes for step in tight.steps) == 3
    assert tight.times(price).mean_ttft > 3 * roomy.times(price).mean_ttft


def test_requests_wait_for_the_clock() -> None:
    load = Workload(trace=((0.0, 100, 10), (100.0, 100, 10)))
    trace = simulate(load, Rules(), price=price)
    times = trace.times(price)
    assert times.ttft == pytest.approx([price(StepSums(0, 0, 100, 0, 1))] * 2)
    assert times.seconds == pytest.approx(100 + times.ttft[1] + 9 * times.tpot[1])


def test_a_request_that_arrives_within_a_step_waits_for_its_end() -> None:
    load = Workload(trace=((0.0, 1000, 10), (0.05, 100, 10)))
    first = price(StepSums(0, 0, 1000, 0, 1))
    waited = simulate(load, Rules(), price=price).times(price).ttft[1]
    assert waited > first - 0.05


def test_agents_that_share_a_prefix_compute_it_once() -> None:
    load = Workload(512, 8, 4, requests=32, shared_prefix=256, agents=2)
    trace = simulate(load, Rules())
    assert trace.prompt_tokens == 32 * 512
    assert 0.35 < trace.cached_tokens / trace.prompt_tokens < 0.5
    computed = sum(step.prompt_tokens for step in trace.steps)
    assert computed == trace.prompt_tokens - trace.cached_tokens


def test_single_tokens_have_no_time_between() -> None:
    times = simulate(Workload(64, 1, 2, requests=4), Rules()).times(price)
    assert times.tpot == []
    assert times.mean_tpot == 0
    assert times.mean_ttft == pytest.approx(fmean(times.ttft))


def test_an_empty_trace_takes_no_time() -> None:
    assert Trace().times(price).seconds == 0


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_an_engine_that_looks_seldom_keeps_requests_waiting(
    admission: AdmissionRule, request: pytest.FixtureRequest
) -> None:
    """Steps take a second, and answers end at different times: a request waits for half of 30 steps on average, and
    those that came meanwhile begin together.
    """
    load = Workload(input_tokens=100, output_tokens=400, concurrency=4, spread=0.2, requests=60)
    often, seldom = (simulate(load, Rules(admission, 8192, poll_steps=steps)) for steps in (1, 30))
    waited = seldom.times(lambda step: 1.0).mean_ttft - often.times(lambda step: 1.0).mean_ttft
    assert 10 < waited < 20
    assert sum(step.prompts > 0 for step in seldom.steps) < sum(step.prompts > 0 for step in often.steps)
    assert sum(step.prompt_tokens for step in seldom.steps) == sum(step.prompt_tokens for step in often.steps)
    request.getfixturevalue("no_leaps")
    walked = simulate(load, Rules(admission, 8192, poll_steps=30))
    assert walked.times(price).ttft == pytest.approx(seldom.times(price).ttft)
