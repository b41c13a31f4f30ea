"""Arrivals at a rate: what is said of them holds however long they go on."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import accumulate
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.cost.profiles import profile
from phalanx.models import catalog
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.engines import ENGINES
from phalanx.plan.explain import verdict
from phalanx.plan.fit import fit
from phalanx.plan.flow import HELD, Flow
from phalanx.plan.predict import predictor
from phalanx.plan.simulate import StepPrice, simulate
from phalanx.plan.steady import SteadyWatch
from phalanx.spec.machine import Machine
from phalanx.spec.workload import Workload
from tests.yardstick import is_done_within

run = CliRunner().invoke
QUESTION = PlanQuestion("Qwen2.5-72B", "8xH100-SXM", formats="fp8", engines="phalanx,vllm", tps="2,4")


@cache
def deployed(engine: str, lengths: tuple[int, int]) -> tuple[Workload, int, StepPrice]:
    """Llama-3.1-8B on one H100: its traffic, room of its cache, price of its steps."""
    spec, machine, load = (
        catalog.model("Llama-3.1-8B"),
        Machine.parse("1xH100-SXM"),
        Workload(*lengths, spread=0.2, rate=1.0),
    )
    room = fit(spec, machine, 1, ENGINES[engine], context=load.longest).kv_tokens
    return load, room, predictor(spec, machine, 1, engine, load).price()


@pytest.mark.parametrize("load", [0.7, 0.8, 0.9])
@pytest.mark.parametrize("requests", [2400, 12_000])
def test_arrivals_keep_a_queue_as_long_as_theory_says(load: float, requests: int) -> None:
    """One server, the same second of service for all, Poisson arrivals: waiting is load / (2 (1 - load)) seconds."""
    waits, free = [], 0.0
    for arrival, *_ in Workload(rate=load, requests=requests).lengths():
        waits.append(max(0.0, free - arrival))
        free = max(free, arrival) + 1
    assert fmean(waits[requests // 5 :]) == pytest.approx(load / (2 * (1 - load)), rel=0.12)


@pytest.mark.parametrize("engine", ["phalanx", "vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("lengths", [(1024, 256), (200, 800), (8000, 100)])
def test_what_flows_through_a_full_batch_is_what_its_steps_let_through(engine: str, lengths: tuple[int, int]) -> None:
    """Against a run whose queue never empties, without its beginning and its end. Prompts-first engines do more."""
    load, room, price = deployed(engine, lengths)
    rules = profile(engine).rules
    crowded = replace(load, rate=1e6, requests=6 * Flow.of(load, rules, room, price).room.sequences)
    trace = simulate(crowded, rules, room, price)
    clock = list(accumulate((price(step) * many for step, many in zip(trace.steps, trace.repeats, strict=True))))
    done = sorted(clock[passage.last - 1] for passage in trace.passages)
    first, last = len(done) // 5, len(done) // 2
    seen = (last - first) / (done[last] - done[first])
    said = Flow.of(load, rules, room, price).capacity / HELD
    assert said == pytest.approx(seen, rel=0.2 if engine == "sglang" else 0.12)


@pytest.mark.parametrize(("engine", "lengths"), [("vllm", (200, 800)), ("trtllm", (2000, 200))])
def test_at_most_of_capacity_a_ten_times_longer_run_says_the_same(engine: str, lengths: tuple[int, int]) -> None:
    load, room, price = deployed(engine, lengths)
    rules = profile(engine).rules
    rate = 0.95 * Flow.of(load, rules, room, price).capacity
    short = simulate(replace(load, rate=rate), rules, room, price)
    assert short.is_steady
    longer = simulate(replace(load, rate=rate, requests=10 * len(short.passages)), rules, room, price).times(price)
    found = short.times(price)
    assert found.mean_ttft == pytest.approx(longer.mean_ttft, rel=0.12)
    assert found.mean_tpot == pytest.approx(longer.mean_tpot, rel=0.12)


@pytest.mark.parametrize("excess", [1.2, 10.0])
def test_a_rate_above_what_steps_let_through_is_seen_to_grow(excess: float) -> None:
    load, room, price = deployed("vllm", (1024, 256))
    rules = profile("vllm").rules
    rate = excess / HELD * Flow.of(load, rules, room, price).capacity
    assert not simulate(replace(load, rate=rate), rules, room, price, SteadyWatch(60)).is_steady


@pytest.mark.parametrize("times", [1.0, 1.02, 30.0])
def test_a_rate_above_capacity_is_never_ok(times: float) -> None:
    """What can be held is said, and is what holds when it is asked for."""
    most = asked(1000.0).best
    assert most is not None
    assert most.capacity is not None
    rate = times * most.capacity
    told = run(app, [*words(QUESTION, rate), "--json"])
    answer = json.loads(told.stdout)
    held = times == 1.0
    assert {each["meets_slo"] for each in answer["candidates"]} == ({True} if held else {False})
    assert answer["best"]["is_held"] is held
    assert answer["machines_needed"] == -int(-times // 1)
    if not held:
        assert f"cannot hold {rate:g} requests/s: the most is {most.capacity:.3g} requests/s" in answer["verdict"]


def asked(rate: float, **more: Any) -> Any:
    return ask(replace(QUESTION, rate=rate, **more))


def words(question: PlanQuestion, rate: float) -> list[str]:
    choice = ["--format", question.formats, "--engine", question.engines, "--tp", question.tps]
    return ["plan", question.model, "--machine", question.machine, *choice, "--rate", repr(rate)]


@cache
def told_at_ten() -> Any:
    """What a program is told of 10 requests/s."""
    return json.loads(run(app, [*words(QUESTION, 10.0), "--json"]).stdout)


def test_shared_prefixes_raise_what_can_be_held() -> None:
    """800 of 1,024 tokens are computed once: 200 requests/s were once "ok" after 320 of them."""
    alone, shared = asked(200.0).best, asked(200.0, shared_prefix=800).best
    assert not alone.is_held
    assert not shared.is_held
    assert alone.capacity < shared.capacity < 200


def test_the_launch_is_what_was_planned_with() -> None:
    plan = asked(10.0)
    told = told_at_ten()
    flag = told["command"].index("--max-num-seqs")
    assert int(told["command"][flag + 1]) == plan.best.sequences == told["best"]["max_num_seqs"]
    assert plan.best.sequences > 100  # as many as its cache holds; the default of 32 clients has no part in it


def test_percentiles_days_and_machines_are_told() -> None:
    shown = run(app, words(QUESTION, 10.0), env={"COLUMNS": "80"}).stdout
    assert "mean" in shown
    assert all(f"p{share}" in shown for share in (50, 95, 99))
    assert "A day: 199.1 M output tokens" in " ".join(shown.split())  # 10 a second of 230.4 tokens
    assert "10 requests/s take 1 machine" in " ".join(shown.split())
    best = told_at_ten()["best"]
    for name in ("ttft", "tpot"):
        tails = [best[f"{name}_p{share}_ms"] for share in (50, 95, 99)]
        assert tails == sorted(tails)
        assert tails[0] < best[f"{name}_ms"]["mid"] * 1.2 < 1.2 * tails[2]
    assert best["tokens_per_day"] == pytest.approx(10 * 230.4 * 86400)


def test_a_tail_goal_asks_for_more_than_a_mean() -> None:
    mean = asked(17.0, slo="tpot:50").best
    tail = asked(17.0, slo="p99-tpot:50").best
    assert tail.gpus > mean.gpus
    goals = tail.prediction.requests_tpot
    assert sorted(goals)[int(0.99 * len(goals))] <= 0.05


def test_a_plan_takes_less_than_a_second() -> None:
    """All engines, formats and degrees, at a rate that takes long looks, on a machine whose plain work takes 33 ms."""
    question = PlanQuestion("Llama-3.3-70B", "8xH100-SXM", rate=200.0)
    assert is_done_within(30, lambda: ask(question))


def test_a_rate_that_three_hundred_requests_cannot_tell_is_not_ok() -> None:
    """72B in FP8 on 8 H100 at 200 requests/s and 800 shared tokens: 370 ms for 320 requests, 35 s for 6,000."""
    plan = ask(PlanQuestion("Qwen2.5-72B", "8xH100-SXM", formats="fp8", rate=200, shared_prefix=800))
    assert plan.best is not None
    assert not plan.best.is_held
    assert not plan.feasible
    assert plan.machines_needed == 4
    assert "cannot hold 200 requests/s" in verdict(plan)
