"""What was measured, and what a running server says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.doctor.checks import measured, serving
from phalanx.doctor.facts import AllReduce, Corruption, Facts, Measured, Rate, Serving
from phalanx.models import catalog
from phalanx.plan.predict import predict
from phalanx.spec.machine import Machine
from phalanx.spec.workload import Workload
from tests.doctor.build_machines import change, hgx, throttled
from tests.doctor.checks.test_gpus import machine, said


def rate(gpu: int, copy: float = 3000, matmul: float = 700) -> Rate:
    return Rate(gpu, "NVIDIA H100 80GB HBM3", copy, matmul, "bf16", 3350, 989)


def with_measured(**told: Any) -> Facts:
    return change(hgx(), measured=Measured(**told))


EVEN = tuple(rate(gpu) for gpu in range(8))


def test_nothing_measured_is_nothing_said() -> None:
    for check in (
        measured.problem,
        measured.corruption,
        measured.memory_rate,
        measured.matmul_rate,
        measured.straggler,
        measured.all_reduce,
        serving.time_outs,
        serving.deaths,
        serving.below_plan,
    ):
        assert said(check(hgx())) == []
        assert said(check(with_measured())) == []


@pytest.mark.parametrize(
    ("fp8", "sheet", "expected"),
    [
        (1300, 1979, [("ok", "fp8_rate")]),
        (720, 1979, [("warning", "fp8_rate")]),
        (None, 1979, []),
        (720, None, []),
    ],
)
def test_fp8_against_bf16_as_measured(fp8: float | None, sheet: float | None, expected: list[tuple[str, str]]) -> None:
    measured_rate = change(rate(0), fp8_tflops=fp8, datasheet_fp8_tflops=sheet)
    assert said(measured.fp8_rate(with_measured(rates=(measured_rate,)))) == expected


def test_wrong_sums_are_an_error_and_right_ones_are_told() -> None:
    wrong = with_measured(checked_bytes=2**30, corruptions=(Corruption(3, 65536, 1), Corruption(3, 65536, 2)))
    finding = measured.corruption(wrong)
    assert finding is not None
    assert finding.level == "error"
    assert "rank 3" in finding.found
    assert said(measured.corruption(with_measured(checked_bytes=2**30))) == [("ok", "corruption")]
    assert said(measured.corruption(with_measured(checked_bytes=2**30, problem="rank 1 died"))) == []


@pytest.mark.parametrize(
    ("check", "rates", "expected"),
    [
        (measured.memory_rate, EVEN, [("ok", "memory_rate")]),
        (measured.memory_rate, (*EVEN[:7], rate(7, copy=2000)), [("warning", "memory_rate")]),
        (measured.matmul_rate, EVEN, [("ok", "matmul_rate")]),
        (measured.matmul_rate, (*EVEN[:7], rate(7, matmul=400)), [("warning", "matmul_rate")]),
        (measured.straggler, EVEN, []),
        (measured.straggler, (*EVEN[:7], rate(7, copy=2600)), [("warning", "straggler")]),
        (measured.straggler, (*EVEN[:7], rate(7, matmul=600)), [("warning", "straggler")]),
        (measured.straggler, EVEN[:1], []),
        (measured.memory_rate, (Rate(-1, "CPU", 20, 0.5),), []),
        (measured.straggler, (Rate(-1, "CPU", 20, 0.5),), []),
    ],
)
def test_rates_against_the_data_sheet(check: Any, rates: tuple[Rate, ...], expected: list[tuple[str, str]]) -> None:
    assert said(check(with_measured(rates=rates))) == expected


@pytest.mark.parametrize(
    ("microseconds", "modelled", "expected"),
    [(12, 10, [("ok", "all_reduce")]), (25, 10, [("warning", "all_reduce")]), (400, None, [("note", "all_reduce")])],
)
def test_all_reduces_against_the_cost_model(
    microseconds: float, modelled: float | None, expected: list[tuple[str, str]]
) -> None:
    found = AllReduce(65536, 4, microseconds, 8.2, modelled)
    assert said(measured.all_reduce(with_measured(backend="nccl", all_reduces=(found,)))) == expected


def test_a_measurement_that_failed_is_told_and_a_time_out_by_its_own_name() -> None:
    failed = with_measured(problem="rank 2 exited with status 1")
    assert said(measured.problem(failed)) == [("error", "measuring")]
    assert said(serving.time_outs(failed)) == []
    hung = with_measured(problem="rank 2 timed out after 60 s")
    assert said(measured.problem(hung)) == []
    assert said(serving.time_outs(hung)) == [("error", "nccl_timeout")]


SERVING = Serving("Llama-3.3-70B", 4, 32.0, 900.0, tpot_ms=30.0)


def served(facts: Facts | None = None, **told: Any) -> Facts:
    return change(facts or hgx(), serving=change(SERVING, **told))


def test_a_stuck_rank_is_explained_by_what_is_wrong_with_the_machine() -> None:
    finding = serving.time_outs(served(throttled(), deaths=("rank_stuck",)))
    assert finding is not None
    assert finding.level == "error"
    assert "Likely here: Clocks are held down by heat" in finding.why
    healthy = serving.time_outs(served(deaths=("rank_stuck",)))
    assert healthy is not None
    assert "Likely here" not in healthy.why


@pytest.mark.parametrize(
    ("deaths", "expected"),
    [
        ((), []),
        (("rank_stuck",), []),
        (("fabric",), [("error", "deaths")]),
        (("rank_died", "rank_died"), [("warning", "deaths")]),
        (("fabric", "engine_died"), [("error", "deaths"), ("warning", "deaths")]),
    ],
)
def test_how_engines_ended(deaths: tuple[str, ...], expected: list[tuple[str, str]]) -> None:
    assert said(serving.deaths(served(deaths=deaths))) == expected


def test_a_server_is_held_against_the_plan_for_its_load() -> None:
    spec = catalog.model("Llama-3.3-70B")
    planned = predict(spec, Machine.parse("8xH100-SXM"), 4, "phalanx", Workload(concurrency=32))
    assert said(serving.below_plan(served(tpot_ms=planned.tpot.mid * 1e3))) == [("ok", "below_plan")]
    slow = serving.below_plan(served(throttled(), tpot_ms=planned.tpot.high * 1e3 * 1.3))
    assert slow is not None
    assert (slow.level, slow.code) == ("warning", "below_plan")
    assert f"planned {planned.tpot.mid * 1e3:.1f}" in slow.found
    assert "Likely here: Clocks are held down by heat" in slow.why


@pytest.mark.parametrize(
    "told",
    [{"tpot_ms": None}, {"concurrency": 0.0}, {"model": "my-own"}, {"tp": 0}, {"tp": 99}],
)
def test_a_server_that_cannot_be_compared_is_not_judged(told: dict[str, Any]) -> None:
    assert said(serving.below_plan(served(**({"tpot_ms": 1e6} | told)))) == []
    assert said(serving.below_plan(served(machine(), tpot_ms=1e6))) == []
