"""A deployment on a machine: each advice with the planner's numbers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from phalanx.doctor.checks import deployment
from phalanx.doctor.checks.deployment import Deployment
from phalanx.doctor.facts import Disk, Facts
from phalanx.models import catalog
from phalanx.plan.candidates import Candidate
from phalanx.plan.choose import choose
from phalanx.plan.engines import ENGINES
from phalanx.spec.machine import Gpu, Link, Machine
from phalanx.spec.workload import Workload
from tests.doctor.build_machines import GIB, change, hgx, no_bridge, pcie_fallback, spark
from tests.doctor.checks.test_gpus import BARE, laptop, machine, said
from tests.doctor.checks.test_links import islands


def of(model: str, tp: int = 1, **told: Any) -> Deployment:
    return Deployment(tp=tp, model=model, spec=catalog.model(model), **told)


@pytest.mark.parametrize(
    ("planned", "facts", "expected"),
    [
        ("8xH100-SXM", hgx(), [("ok", "gpus_planned")]),
        ("4xH100-SXM", hgx(), [("note", "gpus_planned")]),
        ("16xH100-SXM", hgx(), [("error", "gpus_planned")]),
        ("8xH200", hgx(), [("error", "gpus_planned")]),
        ("4xDGX-Spark", spark(), [("ok", "gpus_planned")]),
        ("4xH100-SXM", spark(), [("error", "gpus_planned")]),
        ("4xH100-SXM", machine(), [("error", "gpus_planned")]),
    ],
)
def test_the_gpus_of_the_plan(planned: str, facts: Facts, expected: list[tuple[str, str]]) -> None:
    assert said(deployment.gpus_planned(facts, Deployment(planned=Machine.parse(planned)))) == expected
    assert said(deployment.gpus_planned(facts, Deployment())) == []


@pytest.mark.parametrize(
    ("facts", "tp", "elsewhere", "expected"),
    [
        (hgx(), 8, 0, []),
        (hgx(), 16, 0, [("error", "gpu_count")]),
        (hgx(), 16, 8, []),
        (spark(), 4, 0, [("note", "gpu_count")]),
        (spark(), 4, 3, []),
        (machine(), 4, 0, []),
    ],
)
def test_a_rank_needs_a_gpu(facts: Facts, tp: int, elsewhere: int, expected: list[tuple[str, str]]) -> None:
    assert said(deployment.gpu_count(facts, Deployment(tp=tp, elsewhere=elsewhere))) == expected


@pytest.mark.parametrize(
    ("capability", "runs"), [("7.5", False), ("8.0", True), ("8.9", True), ("12.1", True), (None, True)]
)
def test_what_the_kernels_run_on(capability: str | None, runs: bool) -> None:
    found = deployment.kernels(machine(change(BARE, capability=capability)), Deployment())
    assert said(found) == ([] if runs else [("error", "kernels")])


@pytest.mark.parametrize(
    ("number_format", "capability", "slow"),
    [
        ("fp8", "8.0", True),
        ("fp8", "8.9", False),
        ("fp8-channel", "8.6", True),
        ("nvfp4", "9.0", True),
        ("nvfp4", "10.0", False),
        ("bf16", "8.0", False),
        ("fp8", None, False),
    ],
)
def test_a_format_the_card_does_not_multiply_is_no_faster(
    number_format: str, capability: str | None, slow: bool
) -> None:
    facts = machine(change(BARE, capability=capability))
    found = deployment.number_format(facts, of("Llama-3.1-8B", number_format=number_format))
    assert said(found) == ([("warning", "number_format")] if slow else [])


def test_fp8_blocks_that_do_not_align_name_who_refuses_and_that_phalanx_loads() -> None:
    (finding,) = deployment.shapes(hgx(), of("Qwen2.5-72B", 4, number_format="fp8"))
    assert finding.level == "note"
    assert finding.found.startswith("vLLM, SGLang: FFN's 29568 columns over 4 ranks are 7392")
    assert "Phalanx deals whole blocks" in finding.why
    assert said(deployment.shapes(hgx(), of("Llama-3.3-70B", 4))) == [("ok", "shape")]
    assert said(deployment.shapes(hgx(), of("Llama-3.3-70B", 1))) == []


def test_more_ranks_than_heads_cannot_be_dealt() -> None:
    assert said(deployment.shapes(hgx(), of("SmolLM2-135M", 10))) == [("error", "shape")]


def test_memory_is_counted_on_the_cards_that_were_found() -> None:
    (finding,) = deployment.fits(hgx(), of("Llama-3.3-70B", 4))
    planned = choose(
        catalog.model("Llama-3.3-70B"),
        "",
        Machine.parse("4xH100-SXM"),
        Workload(concurrency=32),
        engines=[ENGINES["phalanx"]],
        formats=["bf16"],
        tps=[4],
    ).best
    assert planned is not None
    assert finding.level == "ok"
    assert f"room for {planned.fit.kv_tokens:,} tokens" in finding.found
    smaller = change(hgx(), gpus=tuple(change(gpu, memory_total_mib=40960) for gpu in hgx().gpus))
    (less,) = deployment.fits(smaller, of("Llama-3.3-70B", 4))
    assert less.found != finding.found
    assert said(deployment.fits(smaller, of("Llama-3.3-70B", 2))) == [("error", "fit")]


def test_ranks_on_other_machines_are_taken_to_be_like_this_one() -> None:
    (finding,) = deployment.fits(spark(), of("Llama-3.3-70B", 2))
    assert finding.level == "ok"
    assert "15% stays with the operating system" in finding.why
    assert said(deployment.fits(spark(), of("Llama-3.3-70B", 1))) == [("error", "fit")]
    assert said(deployment.fits(hgx(), of("Llama-3.3-70B", 16))) == []


def test_a_model_phalanx_does_not_serve_is_counted_for_an_engine_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "phalanx", dataclasses.replace(ENGINES["phalanx"], weight_formats=("bf16",)))
    found = list(deployment.fits(hgx(), of("gpt-oss-120b", 4)))
    assert said(found) == [("warning", "served"), ("ok", "fit")]
    assert "vLLM" in found[0].fix
    assert "(vLLM)" in found[1].found


def test_ranks_are_led_to_the_island_that_holds_them() -> None:
    facts = islands((0,), (1,), (2, 3))
    finding = deployment.tp_links(facts, of("Llama-3.1-8B", 2))
    assert finding is not None
    assert (finding.level, finding.fix) == ("warning", "CUDA_VISIBLE_DEVICES=2,3,0,1")
    assert said(deployment.tp_links(islands((0, 1), (2, 3)), of("Llama-3.1-8B", 2))) == [("ok", "tp_links")]
    assert said(deployment.tp_links(islands((0, 1), (2, 3)), of("Llama-3.1-8B", 4))) == [("warning", "tp_links")]


def test_ranks_over_pcie_are_told_the_price() -> None:
    finding = deployment.tp_links(pcie_fallback(), of("Llama-3.3-70B", 4, concurrency=8))
    assert finding is not None
    assert finding.level == "note"
    assert "Llama-3.3-70B at TP=4 with 8 requests" in finding.found
    assert said(deployment.tp_links(no_bridge(), of("Qwen3-14B", 2))) == [("warning", "tp_links")]
    assert said(deployment.tp_links(hgx(), of("Qwen3-14B", 1))) == []
    assert said(deployment.tp_links(change(hgx(), paths=()), of("Qwen3-14B", 4))) == []


def best_of(machine: str, tp: int, clients: int) -> Candidate:
    plan = choose(
        catalog.model("Llama-3.3-70B"),
        "",
        Machine.parse(machine),
        Workload(concurrency=clients),
        engines=[ENGINES["phalanx"]],
        formats=["bf16"],
        tps=[tp],
    )
    return plan.candidates[0]


def test_a_single_stream_on_nvlink_keeps_its_ranks() -> None:
    """Over NVLink more ranks are faster for one stream: the note says so, with the plan's numbers."""
    finding = deployment.single_stream(hgx(), of("Llama-3.3-70B", 4, concurrency=1))
    whole, half, two = (best_of("4xH100-SXM", tp, clients) for tp, clients in ((4, 1), (2, 1), (2, 2)))
    assert finding is not None
    assert finding.level == "note"
    assert whole.prediction.tpot.mid < half.prediction.tpot.mid
    times = [f"{each.prediction.tpot.mid * 1e3:.1f}" for each in (whole, half)]
    assert f"1 at once: TP=4 {times[0]} ms a token, 2 x TP=2 {times[1]}" in finding.found
    assert f"With 2 at once 2 x TP=2 make {two.throughput:.0f} tokens/s" in finding.found
    assert "add waiting" not in finding.why


@pytest.mark.parametrize("concurrency", [1, 2, 4, 8])
def test_advice_never_contradicts_its_numbers(concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over slow links two groups of half as many ranks may win: only then more ranks are said to add waiting."""
    for link in (None, Link("ethernet", 1e9)):
        if link is not None:
            slow = dataclasses.replace(Gpu.named("H100-SXM"), link=link)
            monkeypatch.setattr(deployment, "machine_of", lambda facts, card=slow: Machine((card,) * 8))
        finding = deployment.single_stream(hgx(), of("Llama-3.3-70B", 4, concurrency=concurrency))
        assert finding is not None
        whole, halves = (
            float(number) for number in re.findall(r"(\d+\.\d) ms a token, 2 x TP=2 (\d+\.\d)", finding.found)[0]
        )
        assert (finding.level == "warning") == (halves < whole) == ("add waiting" in finding.why)
        assert (finding.level == "warning") == (link is not None)


@pytest.mark.parametrize(("tp", "concurrency"), [(4, 64), (2, 1), (16, 1)])
def test_other_loads_are_not_advised(tp: int, concurrency: int) -> None:
    assert said(deployment.single_stream(hgx(), of("Llama-3.3-70B", tp, concurrency=concurrency))) == []


def test_a_model_that_needs_all_ranks_is_not_advised_to_use_fewer() -> None:
    assert said(deployment.single_stream(hgx(), of("Llama-3.1-405B", 8, number_format="fp8", concurrency=1))) == []


def test_fp8_against_bf16_by_the_planner() -> None:
    assert said(deployment.fp8_gain(hgx(), of("Llama-3.3-70B", 4, number_format="fp8"))) == [("ok", "fp8_gain")]
    hardly = deployment.fp8_gain(hgx(), of("Qwen3-0.6B", 8, number_format="fp8", concurrency=1))
    assert said(hardly) == [("note", "fp8_gain")]
    assert said(deployment.fp8_gain(hgx(), of("Llama-3.3-70B", 4))) == []
    assert said(deployment.fp8_gain(no_bridge(), of("Qwen3-14B", 4, number_format="fp8"))) == []


def test_room_on_disk_for_these_weights() -> None:
    def free(gigabytes: int) -> Facts:
        return change(hgx(), system=change(hgx().system, disk=Disk("/data", gigabytes * GIB)))

    assert said(deployment.disk_room(free(100), of("Llama-3.3-70B"))) == [("warning", "disk_room")]
    assert said(deployment.disk_room(free(100), of("Llama-3.3-70B", number_format="fp8"))) == [("ok", "disk_room")]
    assert said(deployment.disk_room(change(hgx(), system=change(hgx().system, disk=None)), of("Qwen3-4B"))) == []


def test_a_processor_needs_memory_for_float32() -> None:
    assert said(deployment.cpu_memory(laptop(), of("Qwen3-0.6B"))) == [("ok", "cpu_memory")]
    assert said(deployment.cpu_memory(laptop(), of("Llama-3.1-8B"))) == [("error", "cpu_memory")]
    assert said(deployment.cpu_memory(hgx(), of("Llama-3.1-8B"))) == []


def test_a_deployment_without_a_model_is_checked_for_its_ranks_alone() -> None:
    plain = Deployment(tp=16)
    found = [
        pair
        for check in (deployment.shapes, deployment.fits, deployment.single_stream)
        for pair in said(check(hgx(), plain))
    ]
    assert found == []
    assert said(deployment.gpu_count(hgx(), plain)) == [("error", "gpu_count")]
