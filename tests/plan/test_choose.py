"""Everything that fits is ranked under the SLO, and the answer says why, what else, and what to relax."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cost.work import count_work
from phalanx.errors import ConfigError
from phalanx.models import catalog, describe
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.candidates import Plan
from phalanx.plan.choose import choose
from phalanx.plan.engines import ENGINES, GIB
from phalanx.plan.explain import advice, explain, gpus_needed, verdict
from phalanx.plan.recipes import command
from phalanx.plan.record import launch_of
from phalanx.plan.search import per_replica
from phalanx.plan.slo import Slo
from phalanx.spec.machine import Machine
from phalanx.spec.workload import Workload
from tests.plan.conftest import ALL_REDUCE, Predictor, around

pytestmark = pytest.mark.usefixtures("predictor")


def planned(model: str = "Llama-3.3-70B", machine: str = "8xH100-SXM", **told: Any) -> Plan:
    workload = told.pop("workload", Workload(1024, 256, 32))
    told.setdefault("engines", [ENGINES["vllm"]])
    return choose(catalog.model(model), model, Machine.parse(machine), workload, **told)


def test_what_meets_the_slo_comes_first_and_then_tokens_a_gpu() -> None:
    plan = planned(engines=list(ENGINES.values()), slo=Slo(tpot=0.009))
    met = [plan.slo.excess(each.prediction) <= 1 for each in plan.candidates]
    assert met == sorted(met, reverse=True)
    assert any(met)
    assert not all(met)
    speeds = [each.per_gpu for each, good in zip(plan.candidates, met, strict=True) if good]
    assert speeds == sorted(speeds, reverse=True)
    assert plan.feasible == plan.candidates[: len(speeds)]


def test_every_tp_is_tried_with_as_many_replicas_as_the_machine_holds() -> None:
    plan = planned(engines=[ENGINES["phalanx"]], formats=["bf16"], machine="8xH200")
    assert {(each.tp, each.replicas) for each in plan.candidates} == {
        (1, 8),
        (2, 4),
        (3, 2),
        (4, 2),
        (5, 1),
        (6, 1),
        (7, 1),
        (8, 1),
    }
    assert all(each.gpus == each.tp * each.replicas <= 8 for each in plan.candidates)
    assert not plan.excluded


def test_the_predictor_is_asked_about_one_replica_with_its_room(predictor: Predictor) -> None:
    plan = planned(formats=["fp8"], tps=[2], engines=[ENGINES["vllm"], ENGINES["phalanx"]], machine="8xH200")
    vllm, _ = predictor.calls
    assert (vllm["workload"].concurrency, vllm["engine"], vllm["weights"], vllm["kv"]) == (8, "vllm", "fp8", "bf16")
    assert {call["kv_tokens"] for call in predictor.calls} == {each.fit.kv_tokens for each in plan.candidates}
    assert plan.best is not None
    assert plan.best.throughput == pytest.approx(4 * plan.best.prediction.throughput.mid)


def test_experts_that_must_stay_whole_are_predicted_so(predictor: Predictor) -> None:
    plan = planned("Qwen3-235B-A22B-FP8", "8xH200", tps=[4, 8])
    assert {(each.tp, each.expert_parallel) for each in plan.candidates} == {(4, False), (8, True)}
    assert sorted(call["ep"] for call in predictor.calls) == [1, 8]
    assert any("TP=8+EP" in each.label for each in plan.candidates)


def test_formats_are_the_checkpoint_s_own_and_fp8_where_it_is_not_quantised() -> None:
    assert {each.weight_format for each in planned().candidates} == {"bf16", "fp8"}
    assert {each.weight_format for each in planned("gpt-oss-120b").candidates} == {"mxfp4"}


def test_a_closed_loop_fills_the_machine_and_arrivals_may_need_less() -> None:
    closed = planned(tps=[2], formats=["fp8"])
    by_the_clock = planned(tps=[2], formats=["fp8"], workload=Workload(1024, 256, 32, rate=3.0))
    assert [each.replicas for each in closed.candidates] == [4]
    assert [(each.replicas, each.workload.rate, each.capacity) for each in by_the_clock.candidates] == [(2, 1.5, 4.0)]


def test_a_slow_answer_at_a_rate_takes_more_replicas() -> None:
    """One replica would hold it, a millisecond a client: of 32 clients 32 ms, of 8 clients 8."""
    plan = planned(tps=[2], formats=["fp8"], workload=Workload(1024, 256, 32, rate=1.5), slo=Slo(ttft=0.010))
    assert [each.replicas for each in plan.feasible] == [4]
    assert {each.replicas for each in plan.candidates} == {1, 2, 3, 4}


def test_a_rate_that_is_too_high_is_answered_with_what_can_be_held() -> None:
    plan = planned(tps=[2], formats=["fp8"], workload=Workload(1024, 256, 32, rate=17.0))
    assert plan.best is not None
    assert (plan.best.capacity, plan.best.is_held, plan.feasible) == (8.0, False, ())
    assert plan.best.workload.rate == 2.0
    assert plan.machines_needed == 3
    assert "cannot hold 17 requests/s: the most is 8 requests/s" in verdict(plan)
    assert "3 such machines" in verdict(plan)


def test_a_replica_s_share_of_the_traffic() -> None:
    trace = tuple((float(second), 10 + second, 5) for second in range(5))
    share = per_replica(Workload(100, 10, 33, requests=101, trace=trace, shared_prefix=50, agents=5), 2)
    assert (share.concurrency, share.requests, share.agents, share.shared_prefix) == (17, 51, 3, 50)
    assert share.trace == trace[::2]
    assert per_replica(share, 1) is share


def test_the_winner_is_explained_in_two_sentences_with_its_numbers() -> None:
    plan = planned(formats=["bf16"], machine="4xH100-SXM")
    best = plan.best
    assert best is not None
    words = explain(plan)
    assert len(re.findall(r"\.(?: |$)", words)) == 2
    assert f"{best.fit.tightest.weight_bytes / GIB:.1f} GiB of weights" in words
    assert f"{best.fit.kv_tokens:,} tokens or {best.fit.max_sequences} requests of 1280" in words
    assert f"All-reduces take {best.prediction.all_reduce_share:.0%} of a decode step" in words
    assert re.search(r"TP=\d x \d gives [+-]\d+% tokens a GPU", words)


def test_tp_side_by_side_with_scaling_against_the_smallest() -> None:
    plan = planned(formats=["fp8"], machine="8xH200")
    assert [each.tp for each in plan.side_by_side] == [1, 2, 4, 8]
    first, second = plan.side_by_side[:2]
    assert plan.scaling(first) == 1
    reads = first.prediction.tpot.mid
    assert second.prediction.tpot.mid == pytest.approx(reads / 2 + ALL_REDUCE, rel=1e-3)
    assert plan.scaling(second) == pytest.approx(second.per_gpu / first.per_gpu)


@pytest.mark.parametrize("machine", ["8xMI300X"])
def test_phalanx_is_not_planned_on_cards_without_its_kernels(machine: str) -> None:
    plan = planned("Qwen3-8B", machine, formats=["bf16"], engines=list(ENGINES.values()))
    assert "phalanx" not in {each.engine.name for each in plan.candidates}
    assert plan.candidates
    assert {each.code for each in plan.excluded if each.engine == "phalanx"} == {"no_kernels"}
    assert "from compute capability 8.0 on" in plan.excluded[0].found


@pytest.mark.parametrize("machine", ["4xA100", "2xRTX4090", "2xH100-SXM+1xA100"])
def test_phalanx_is_planned_on_cards_that_its_kernels_are_built_for(machine: str) -> None:
    plan = planned("Qwen3-8B", machine, formats=["bf16"], engines=list(ENGINES.values()))
    assert "phalanx" in {each.engine.name for each in plan.candidates}


def test_replicas_on_unlike_cards_fit_the_smallest_and_are_as_fast_as_the_slowest() -> None:
    best = planned("Qwen3-8B", "1xRTX4090+1xRTX3090", formats=["bf16"], tps=[1]).best
    assert best is not None
    assert (best.fit.tightest.gpu.name, best.group.name) == ("RTX4090", "1xRTX3090")  # 12 MiB less, 8 % faster


def test_replicas_on_unlike_cards_are_planned_by_the_weakest() -> None:
    plan = planned("Qwen3-8B", "2xRTX5090+2xRTX3090", formats=["bf16"], tps=[2])
    best = plan.best
    assert best is not None
    assert (best.replicas, best.group.name) == (2, "2xRTX3090")
    assert best.fit.tightest.gpu.name == "RTX3090"
    assert best.cost.hourly == pytest.approx(2 * 0.65 + 2 * 0.34)
    assert best.prediction.tpot.mid == pytest.approx(plan.spec.weight_bytes("bf16") / 2 / 936e9 + ALL_REDUCE)


def test_a_machine_is_paid_whole_and_arrivals_pay_for_what_they_use() -> None:
    told: dict[str, Any] = {"engines": [ENGINES["phalanx"]], "formats": ["bf16"], "tps": [3], "machine": "8xH200"}
    closed, clock = planned(**told).best, planned(**told, workload=Workload(rate=4.0)).candidates[-1]
    assert closed is not None
    assert (closed.gpus, len(closed.paid), clock.gpus, len(clock.paid)) == (6, 8, 6, 6)
    assert (closed.cost.hourly, clock.cost.hourly) == (8 * 4.0, 6 * 4.0)
    assert closed.per_gpu == pytest.approx(closed.throughput / 8)
    assert closed.usd_per_million == pytest.approx(32 / closed.throughput / 3600 * 1e6)


def test_an_slo_that_nothing_meets_is_answered_with_the_nearest_point_and_what_to_relax() -> None:
    plan = planned(formats=["fp8"], tps=[4], slo=Slo(ttft=0.005, tpot=0.050))
    assert plan.feasible == ()
    said = " ".join(advice(plan))
    best = plan.best
    assert best is not None
    assert best.label in said
    assert f"TTFT {best.prediction.ttft.mid * 1e3:.0f} ms" in said
    assert "TPOT" not in said
    relaxed = re.search(r"ttft:(\d+)", said)
    assert relaxed is not None
    assert Slo.parse(relaxed[0]).excess(best.prediction) <= 1
    lowered = re.search(r"lower the concurrency to (\d+)", said)
    assert lowered is not None
    assert int(lowered[1]) == 8  # two replicas of 16 clients wait 16 ms, of 4 clients 4 ms
    again = planned(formats=["fp8"], tps=[4], slo=plan.slo, workload=Workload(1024, 256, int(lowered[1])))
    assert again.feasible


def test_arrivals_that_are_too_many_are_halved_until_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def queue(spec: object, machine: object, tp: int, *, workload: Workload, **told: object) -> SimpleNamespace:
        assert workload.rate is not None
        return SimpleNamespace(ttft=around(workload.rate), tpot=around(0.01), throughput=around(100.0), is_held=True)

    monkeypatch.setattr("phalanx.plan.search.predict", queue)
    plan = planned(formats=["fp8"], tps=[8], slo=Slo(ttft=0.6), workload=Workload(1024, 256, 32, rate=2.0))
    assert "lower the rate to 0.5 requests/s (this plan: 2)." in advice(plan)


def test_an_slo_that_no_concurrency_meets_asks_for_other_gpus() -> None:
    plan = planned(formats=["fp8"], slo=Slo(tpot=0.0001))
    said = " ".join(advice(plan))
    assert "faster or more GPUs" in said
    relaxed = re.search(r"tpot:(\d+)", said)
    assert relaxed is not None
    assert plan.best is not None
    assert Slo.parse(relaxed[0]).excess(plan.best.prediction) <= 1
    assert advice(planned(formats=["fp8"])) == []


def test_what_is_left_out_says_why_with_numbers() -> None:
    plan = planned("Qwen2.5-72B", "4xH100-SXM", engines=list(ENGINES.values()), formats=["fp8"])
    found = {(each.engine, each.tp): each for each in plan.excluded}
    assert "no multiple of the 128-wide block" in found["vllm", 4].found
    assert "8 KV heads and 3 ranks" in found["trtllm", 3].found
    assert found["trtllm", 3].fix == "The nearest that works: TP=2 or TP=4."
    assert {each.tp for each in plan.candidates if each.engine.name == "phalanx"} == {1, 2, 3, 4}


def test_what_phalanx_does_not_run_is_left_out_by_name(tmp_path: Path) -> None:
    strange = tmp_path / "config.json"
    strange.write_text(json.dumps(dict(catalog.entries()["Llama-3.1-8B"].config) | {"third_eye": True}))
    plan = planned(str(strange), engines=[ENGINES["phalanx"]], formats=["bf16"], machine="1xH200")
    assert plan.best is None
    assert "third_eye" in plan.excluded[0].found
    wide = planned("Llama-3.1-8B", engines=[ENGINES["vllm"]], formats=["fp32"], machine="1xH200")
    assert "it loads bf16, fp16, fp8" in wide.excluded[0].found
    picky = dataclasses.replace(ENGINES["phalanx"], kv_formats=("bf16",))
    small_kv = planned("Llama-3.1-8B", engines=[picky], kv_format="fp8", machine="1xH200")
    assert "does not keep KV as fp8; it keeps bf16" in small_kv.excluded[0].found


def test_phalanx_keeps_kv_in_fp8_and_is_told_so() -> None:
    plans = [
        planned("Llama-3.1-8B", engines=[ENGINES["phalanx"]], formats=["bf16"], kv_format=kv, machine="1xH200")
        for kv in ("bf16", "fp8")
    ]
    wide, narrow = (plan.candidates[0] for plan in plans)
    assert narrow.fit.kv_tokens == pytest.approx(2 * wide.fit.kv_tokens, rel=1e-3)
    commands = [" ".join(command(launch_of(plan, plan.candidates[0]))) for plan in plans]
    assert ["--kv-cache-dtype fp8" in told for told in commands] == [False, True]


def test_states_in_bf16_leave_room_for_more_sequences_and_less_to_read() -> None:
    question = PlanQuestion("Qwen3.5-35B-A3B", "1xH200", concurrency=256, engines="phalanx", formats="fp8", tps="1")
    plans = [ask(dataclasses.replace(question, state_dtype=asked)) for asked in ("auto", "fp32", "bfloat16")]
    wide, same, narrow = (plan.candidates[0] for plan in plans)
    assert same.fit.max_sequences == wide.fit.max_sequences
    assert narrow.fit.max_sequences > 1.4 * wide.fit.max_sequences
    commands = [" ".join(command(launch_of(plan, plan.candidates[0]))) for plan in plans]
    assert ["--state-dtype bf16" in told for told in commands] == [False, False, True]
    read = [count_work(plan.spec, 1, "fp8", "bf16").state_bytes for plan in plans]
    assert read[0] == read[1]
    assert read[2] < 0.52 * read[0]


@pytest.mark.parametrize(
    ("model", "asked", "told"),
    [
        ("Llama-3.1-8B", "bf16", "has no recurrent states"),
        ("Qwen3.5-35B-A3B", "fp16", "state_dtype is 'fp16'"),
    ],
)
def test_states_that_no_model_has_or_keeps_so_are_refused(model: str, asked: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ask(PlanQuestion(model, "1xH200", state_dtype=asked))


def test_a_checkpoint_that_phalanx_cannot_read_is_left_out_in_that_format_only() -> None:
    blocks = {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}
    told = {"quant_method": "compressed-tensors", "config_groups": {"group_0": blocks}}
    spec = describe(dict(catalog.entries()["Llama-3.1-8B"].config) | {"quantization_config": told})
    machine, engines = Machine.parse("1xH200"), [ENGINES["phalanx"], ENGINES["vllm"]]
    plan = choose(spec, "mine", machine, Workload(), engines=engines, formats=["fp8", "bf16"])
    assert {(each.engine.name, each.weight_format) for each in plan.candidates} == {
        ("vllm", "fp8"),
        ("vllm", "bf16"),
        ("phalanx", "bf16"),
    }
    assert "'compressed-tensors'" in plan.excluded[0].found


def test_a_model_that_does_not_fit_says_how_much_is_missing_and_what_would_do() -> None:
    plan = planned(machine="1xH100-SXM", formats=["bf16"])
    assert plan.best is None
    assert plan.excluded[0].code == "does_not_fit"
    assert re.search(r"needs 131\.4 GiB for weights.*GiB short", plan.excluded[0].found)
    assert gpus_needed(plan) == ["With vLLM, H100-SXM holds it at TP=2 in bf16, TP=1 in fp8, TP=1 in awq."]


def test_requests_longer_than_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"reach 200,256 tokens; .* was made for 131,072"):
        planned(workload=Workload(200_000, 256, 1))


def test_a_request_that_outgrows_the_cache_is_told_the_length_that_fits() -> None:
    plan = planned("Llama-3.1-8B", "1xRTX4090", formats=["bf16"], workload=Workload(100_000, 256, 1))
    assert plan.best is None
    longest = re.search(r"Shorten requests to (\d+) tokens", plan.excluded[0].fix)
    assert longest is not None
    shorter = planned("Llama-3.1-8B", "1xRTX4090", formats=["bf16"], workload=Workload(int(longest[1]) - 32, 16, 1))
    assert shorter.best is not None


@pytest.mark.parametrize(
    ("text", "ttft", "tpot"),
    [("ttft:800,tpot:50", 0.8, 0.05), ("TPOT:20ms", None, 0.02), ("", None, None), (" ttft : 1e3 ", 1.0, None)],
)
def test_an_slo_is_written_in_milliseconds(text: str, ttft: float | None, tpot: float | None) -> None:
    assert Slo.parse(text) == Slo(ttft, tpot)


def test_an_slo_may_be_about_percentiles() -> None:
    slo = Slo.parse("p95-ttft:800, tpot-p99:60,tpot:40")
    assert slo.goals == {"p95-ttft": 0.8, "p99-tpot": 0.06, "tpot": 0.04}
    waits = tuple(0.01 * number for number in range(1, 101))  # 10 ms to 1 s
    seen: Any = SimpleNamespace(tpot=around(0.02), ttft=around(0.5), requests_ttft=waits, requests_tpot=(0.03, 0.05))
    assert slo.missed(seen) == [("p95-ttft", pytest.approx(0.96), 0.8)]
    assert slo.excess(seen) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tfft:800", "Did you mean ttft"),
        ("p95-tftt:800", "Did you mean ttft"),
        ("p995-ttft:800", "p95-ttft:800"),
        ("tpot:fast", "tpot:50"),
        ("ttft:-1", "above 0"),
        ("ttft:0", "above 0"),
        ("tpot:nan", "above 0"),
    ],
)
def test_a_wrong_slo_is_answered_with_a_right_one(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Slo.parse(text)
    assert refused.value.code == "bad_slo"
    assert named in refused.value.fix


def test_a_longer_context_must_fit_and_is_what_gets_launched() -> None:
    """Llama-3.3-70B in fp8 on one H100: room for some 10 thousand tokens."""
    asked = PlanQuestion("Llama-3.3-70B", "1xH100-SXM", concurrency=2, engines="phalanx", formats="fp8")
    usual = ask(asked)
    assert usual.context == 1280
    assert usual.best is not None
    room = usual.best.fit.longest_context
    longer = ask(dataclasses.replace(asked, context=room))
    assert longer.best is not None
    assert longer.best.prediction == usual.best.prediction
    assert launch_of(longer, longer.best).max_model_len == room
    refused = ask(dataclasses.replace(asked, context=room + 1))
    assert refused.best is None
    assert f"one request reaches {room + 1}" in refused.excluded[0].found
