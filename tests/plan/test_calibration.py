"""A plan made with a calibration: moved by what was measured, and it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.cost.fitted import load_fitted
from phalanx.models import catalog
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.candidates import Plan
from phalanx.plan.predict import Prediction, predict
from phalanx.plan.record import to_dict
from phalanx.spec.calibration import AllReduceTimes, Calibration, CalibrationError, GpuShare
from phalanx.spec.machine import Machine
from phalanx.spec.workload import Workload

run = CliRunner().invoke
SIZES = tuple(8192 << power for power in range(14))
LOAD = Workload(1024, 256, 16, spread=0.2, requests=32)


def measured(
    memory: float = 0.90, bf16: float = 0.79, fp8: float = 0.65, link: float = 1.0, ranks: tuple[int, ...] = (2, 4, 8)
) -> Calibration:
    """Eight H100 with these shares of the datasheet; all-reduces take `link` times what the cost model has of NCCL."""
    box = Machine.parse("8xH100-SXM")
    tables = tuple(
        AllReduceTimes(
            count, SIZES, tuple(1e6 * link * all_reduce_seconds(size, count, box.link(count), "nccl") for size in SIZES)
        )
        for count in ranks
    )
    gpus = tuple(GpuShare(index, "H100-SXM", memory, bf16, fp8) for index in range(max(ranks, default=1)))
    name = f"{len(gpus)}xH100-SXM"
    return Calibration("2026-11-15T10:00:00Z", name, "box7", "phalanx doctor --measure", gpus, tables)


def predicted(calibration: Calibration | None, tp: int = 4, engine: str = "phalanx") -> Prediction:
    machine = Machine.parse("8xH100-SXM")
    machine = machine if calibration is None else machine.calibrated(calibration)
    return predict(catalog.model("Llama-3.3-70B"), machine, tp, engine, LOAD, "fp8")


def planned(calibration: Calibration | Path | None, machine: str = "4xH100-SXM", engines: str = "phalanx") -> Plan:
    question = PlanQuestion(
        "Llama-3.3-70B", machine, engines=engines, formats="fp8", requests=32, calibration=calibration, tps="1,2,4"
    )
    return ask(question)


@pytest.mark.parametrize("engine", ["phalanx", "vllm", "sglang", "trtllm"])
def test_a_healthy_machine_changes_next_to_nothing(engine: str) -> None:
    before, after = predicted(None, engine=engine), predicted(measured(), engine=engine)
    for name in ("ttft", "tpot", "throughput"):
        assert getattr(after, name).mid == pytest.approx(getattr(before, name).mid, rel=0.01)


def test_a_card_that_copies_at_half_reads_twice_as_long_and_computes_as_before() -> None:
    before, after = predicted(None, 1).step, predicted(measured(memory=0.45), 1).step
    assert after.attention == pytest.approx(2 * before.attention)
    assert 1.8 * before.weights < after.weights <= 2 * before.weights
    assert predicted(measured(memory=0.45), 1).tpot.mid > 1.3 * predicted(None, 1).tpot.mid


def test_a_card_that_multiplies_at_half_takes_longer_to_the_first_token_more_than_between_tokens() -> None:
    before, after = predicted(None), predicted(measured(bf16=0.395, fp8=0.325))
    assert after.ttft.mid > 1.2 * before.ttft.mid
    assert after.step.attention == before.step.attention
    assert after.tpot.mid / before.tpot.mid < after.ttft.mid / before.ttft.mid


def test_a_card_better_than_healthy_is_three_per_cent_faster_at_most() -> None:
    before, after = predicted(None, 1), predicted(measured(memory=1.0, bf16=1.0, fp8=1.0), 1)
    assert before.tpot.mid / 1.03 < after.tpot.mid < before.tpot.mid


def test_all_reduces_of_a_step_take_what_was_measured() -> None:
    """80 layers, two of 16 rows x 8192 x 2 B each, at the engine's fitted distance to NCCL."""
    flat = Calibration(
        "2026-11-15", "8xH100-SXM", "box7", "", measured().gpus, (AllReduceTimes(4, (8192, 2**26), (50.0, 50.0)),)
    )
    fitted = load_fitted().family_rates("phalanx", "Hopper")
    assert predicted(flat).step.all_reduce == pytest.approx(2 * 80 * 50e-6 * fitted.all_reduce)
    assert predicted(flat, tp=2).step.all_reduce == predicted(None, tp=2).step.all_reduce


def test_a_slow_link_turns_one_replica_of_four_into_two_of_two() -> None:
    (before, after) = (planned(calibration).best for calibration in (None, measured(link=4, ranks=(2, 4))))
    assert before is not None
    assert after is not None
    assert before.tp == 4
    assert after.tp < 4


def test_every_replica_and_every_lighter_traffic_is_priced_as_measured() -> None:
    plan = planned(measured(ranks=(2, 4)))
    assert {candidate.tp for candidate in plan.candidates} == {1, 2, 4}
    assert all(candidate.group.calibration is plan.machine.calibration for candidate in plan.candidates)


def test_without_a_calibration_nothing_changes_and_nothing_is_said() -> None:
    plan = planned(None)
    assert plan.machine.calibration is None
    assert to_dict(plan)["calibration"] is None


def test_a_plan_says_what_it_was_calibrated_by(tmp_path: Path) -> None:
    path = tmp_path / "box7.json"
    measured(memory=0.60, ranks=(2, 4)).write(path)
    words = ["plan", "Llama-3.3-70B", "--machine", "4xH100-SXM", "--engine", "vllm", "--calibration", str(path)]
    shown = run(app, words, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    told = "Calibrated by a measurement of 2026-11-15 on box7, 4xH100-SXM: memory 0.67, bf16 1.00, fp8 1.00"
    assert told in shown.stdout
    assert "all-reduces over 2 and 4 ranks as measured" in shown.stdout
    found = json.loads(run(app, [*words, "--json"]).stdout)["calibration"]
    assert (found["date"], found["machine"], found["host"]) == ("2026-11-15T10:00:00Z", "4xH100-SXM", "box7")
    assert found["factors"] == pytest.approx({"memory": 2 / 3, "bf16": 1.0, "fp8": 1.0})
    assert found["all_reduce_ranks"] == [2, 4]
    assert found["notes"] == []


def test_fewer_ranks_than_planned_are_used_as_far_as_they_go() -> None:
    half = planned(measured(memory=0.45, link=4, ranks=(2,)), "8xH100-SXM")
    notes = to_dict(half)["calibration"]["notes"]
    assert notes == [
        "note: All-reduces over 4 ranks were not measured: the cost model's are used.",
        "note: 2xH100-SXM was measured, 8xH100-SXM is planned.",
    ]
    steps = {each.tp: each.prediction.step for each in half.candidates}
    plain = {each.tp: each.prediction.step for each in planned(None, "8xH100-SXM").candidates}
    assert steps[4].all_reduce == plain[4].all_reduce
    assert steps[2].all_reduce > 3 * plain[2].all_reduce
    assert steps[4].attention == pytest.approx(2 * plain[4].attention)


def test_a_calibration_without_all_reduces_still_says_what_cards_do() -> None:
    plan = planned(measured(ranks=()))
    assert to_dict(plan)["calibration"]["all_reduce_ranks"] == []


@pytest.mark.parametrize("machine", ["4xH200", "2xH100-SXM+2xH200", "4xRTX4090"])
def test_a_calibration_of_other_gpus_is_refused(machine: str) -> None:
    with pytest.raises(CalibrationError, match="of 8xH100-SXM, the plan is for"):
        planned(measured(), machine)


def test_a_file_that_is_no_calibration_is_refused_with_its_reason(tmp_path: Path) -> None:
    good = json.loads(json.dumps({"date": "d", "machine": "m", "host": "h", "source": "s", "version": 1}))
    gpu = {"index": 0, "name": "H100-SXM", "bandwidth": 0.9}
    table = {"ranks": 2, "sizes": [8192, 16384], "microseconds": [5.0, 6.0]}
    bad = [
        "not json",
        "{}",
        json.dumps(good),
        json.dumps(good | {"gpus": [gpu | {"bandwidth": 0}]}),
        json.dumps(good | {"gpus": [gpu | {"bandwidth": "fast"}]}),
        json.dumps(good | {"gpus": [gpu], "version": 2}),
        json.dumps(good | {"gpus": [gpu], "all_reduces": [table | {"microseconds": [5.0]}]}),
        json.dumps(good | {"gpus": [gpu], "all_reduces": [table | {"microseconds": [5.0, -6.0]}]}),
        json.dumps(good | {"gpus": [gpu], "all_reduces": [table | {"sizes": [16384, 8192]}]}),
        json.dumps(good | {"gpus": [gpu], "all_reduces": [table, table]}),
    ]
    path = tmp_path / "calibration.json"
    for text in bad:
        path.write_text(text)
        with pytest.raises(CalibrationError, match="is no calibration") as caught:
            planned(path)
        assert caught.value.code == "bad_calibration", text
    path.write_text(json.dumps(good | {"gpus": [gpu], "all_reduces": [table]}))
    assert planned(path).best is not None
    with pytest.raises(CalibrationError, match="No such file"):
        planned(tmp_path / "nowhere.json")
