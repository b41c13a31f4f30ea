"""Levers, goodput under an SLO, and the published ladder of an 8x H100 node, all in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp

import pytest

from phalanx.cost.rules import Rules
from phalanx.models import catalog
from phalanx.plan.goodput import PlannedRun, Priced, Traffic
from phalanx.plan.simulate import simulate
from phalanx.plan.slo import Slo
from phalanx.plan.tuning import Lever, Setting, Value, caching, climb, difference, scheduling
from phalanx.spec.machine import Machine
from phalanx.spec.workload import Workload

NODE = Machine.parse("8xH100-SXM")
PUBLISHED = (1820, 3120, 4520)
"""Output tokens a second: static batches, continuous ones, then prefix caching and FP8 for 4-bit weights. From
https://docs.alayanew.com/en/docs/tech-blog/2026-04-vllm-on-h100."""


def share_gpt(requests: int) -> tuple[tuple[float, int, int], ...]:
    """Lengths like ShareGPT's, 338 out on average as the vLLM paper has it, behind a system prompt of 800 tokens, which
    is 71 % of a prompt.
    """
    chance = random.Random(1)

    def drawn(mean: float, most: int) -> int:
        return int(min(most, max(4, mean * exp(chance.gauss(0, 0.9) - 0.9**2 / 2))))

    return tuple((0.0, 800 + drawn(327, 2000), drawn(338, 2048)) for _ in range(requests))


def test_the_published_ladder_within_15_percent_a_step() -> None:
    """All requests there from the start, 64 at once, as in an offline benchmark of the engine of that page."""
    load = Workload(1127, 338, concurrency=64, trace=share_gpt(512), shared_prefix=800)
    judge = PlannedRun(catalog.model("Qwen2.5-72B"), NODE, Traffic(load, Slo()), engine="vllm")
    static = Setting(tp=8, weights="awq", admission="static", max_num_batched_tokens=8192)
    continuous = replace(static, admission="fair")
    cached = replace(continuous, prefix_caching=True, max_num_batched_tokens=16384)
    in_fp8 = replace(cached, weights="fp8", kv="fp8")
    runs = [judge.run(setting, load) for setting in (static, continuous, cached, in_fp8)]
    made = [run.throughput.mid for run in runs]
    assert made[1] / made[0] == pytest.approx(PUBLISHED[1] / PUBLISHED[0], rel=0.15)
    assert made[3] / made[1] == pytest.approx(PUBLISHED[2] / PUBLISHED[1], rel=0.15)
    assert runs[2].cached_share == pytest.approx(0.71, abs=0.02)
    assert made[3] < 1.1 * made[2], "the model has nearly all of the second gain from caching, little from FP8"


def test_a_static_batch_lets_nobody_in_before_all_have_left() -> None:
    load = Workload(64, 32, concurrency=4, spread=0.9, requests=16)
    for admission, together in (("static", True), ("mixed", False)):
        trace = simulate(load, Rules(admission, 8192, 4))  # type: ignore[arg-type]
        begun = sorted((passage.first, passage.last) for passage in trace.passages)
        apart = all(last <= later for first, last in begun for later, _ in begun if later > first)
        assert apart == together


def price_of(step: float, row: float, token: float) -> Priced:
    load = Workload(128, 32, shared_prefix=96)
    return Priced(
        lambda sums: step + row * sums.decodes + token * sums.prompt_tokens, 10**6, Traffic(load, Slo.parse("tpot:60"))
    )


def test_goodput_is_the_most_that_the_slo_allows() -> None:
    """Steps of 20 ms and 1 ms a row: more than 40 rows would be too slow."""
    judge = price_of(0.020, 0.001, 0.00005)
    setting = Setting(max_num_seqs=256)
    found = judge(setting)
    assert 0.045 < found.tpot <= 0.060
    beyond = replace(judge.traffic.load, rate=1.1 * found.rate)
    assert judge.traffic.slo.excess(judge.run(setting, beyond)) > 1
    strict = replace(judge, traffic=Traffic(judge.traffic.load, Slo.parse("tpot:15")))
    assert strict(setting).problem == "no rate meets the SLO"
    free = replace(judge, traffic=Traffic(judge.traffic.load, Slo()))
    assert free(setting).goodput > found.goodput


def test_caching_pays_by_what_is_shared() -> None:
    judge = price_of(0.020, 0.0001, 0.001)
    plain, cached = judge(Setting()), judge(Setting(prefix_caching=True))
    assert cached.hits == pytest.approx(0.75, abs=0.01)
    assert plain.hits == 0
    assert cached.goodput > 2 * plain.goodput


def test_a_trace_is_played_faster_until_it_is_too_much() -> None:
    judge = price_of(0.020, 0.001, 0.00005)
    arrivals = tuple((float(second), 128, 32) for second in range(100))
    played = replace(judge, traffic=Traffic(Workload(trace=arrivals), Slo.parse("tpot:60")))
    assert played(Setting(max_num_seqs=256)).rate > 5


def test_levers_are_pulled_in_order_and_only_where_it_pays() -> None:
    worth = {64: 100.0, 128: 101.0, 256: 150.0}

    def judge(setting: Setting) -> Value:
        return Value(worth.get(setting.max_num_seqs, 50.0) * (2 if setting.prefix_caching else 1))

    sizes = Lever("sequences", lambda setting: [replace(setting, max_num_seqs=size) for size in worth])
    nothing = Lever("nothing", lambda setting: [replace(setting, speculate="auto")])
    told: list[str] = []
    rungs = climb(Setting(), [sizes, nothing, caching()], judge, told.append)
    assert [(rung.lever, rung.value.goodput) for rung in rungs] == [
        ("start", 100), ("sequences", 150), ("nothing", 150), ("prefix caching", 300)
    ]  # fmt: skip
    assert rungs[1].setting.max_num_seqs == 256
    assert rungs[2].setting == rungs[1].setting
    assert difference(rungs[0].setting, rungs[-1].setting) == "prefix caching on, 256 sequences"
    assert "nothing: speculation auto" in told


def test_a_plan_of_a_node_ends_above_where_it_began() -> None:
    traffic = Traffic(Workload(1024, 128, shared_prefix=512), Slo.parse("p95-ttft:1000,tpot:50"))
    judge = PlannedRun(catalog.model("Llama-3.3-70B"), NODE, traffic)
    start = Setting(tp=8)
    rungs = climb(start, [scheduling()[2], caching()], judge, lambda words: None)
    assert rungs[-1].value.goodput > 1.2 * rungs[0].value.goodput > 0
    assert judge(Setting(tp=1)).problem.startswith("bf16 at TP=1 does not fit")
