"""What measurements are held against: the planner's price of the steps that ran, or the server's own first minutes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phalanx.engine.blocks import BlockPool
from phalanx.engine.core import Engine
from phalanx.engine.modelled import ModelledRunner
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Limits, Scheduler
from phalanx.engine.step_plan import Totals
from phalanx.models import catalog
from phalanx.plan.predict import Interval, predict
from phalanx.spec.machine import Gpu, Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload
from phalanx.web.expect import SECONDS_A_SIZE, Baseline, Load, Planned, expectation

INPUT, OUTPUT, CLIENTS = 512, 128, 16


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return catalog.model("Llama-3.1-8B")


def served() -> Totals:
    """What an engine's books say after a closed loop of clients."""
    runner = ModelledRunner(price=lambda plan: 0.0)
    pool = BlockPool(CLIENTS * 64, 16, prefix_caching=False)
    engine = Engine(Scheduler(Limits(CLIENTS, 2048, 1024), pool), runner, vocab=100)
    for _ in range(CLIENTS * 10):
        engine.add([1] * INPUT, SamplingParams(max_tokens=OUTPUT, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return engine.totals


def test_books_hold_the_sums_of_all_steps() -> None:
    totals = served()
    requests = CLIENTS * 10
    assert totals.finished == totals.steps
    assert totals.decodes == requests * (OUTPUT - 1)
    assert totals.tokens == requests * (INPUT + OUTPUT - 1)
    assert totals.context == requests * sum(range(INPUT + 1, INPUT + OUTPUT))
    assert totals.prompt_pairs == requests * INPUT * (INPUT + 1) / 2
    assert requests / CLIENTS <= totals.prompt_steps <= totals.prompts


@pytest.mark.parametrize("tp", [1, 4])
def test_a_plan_of_the_steps_that_ran_is_what_the_planner_predicts_for_the_load(spec: ModelSpec, tp: int) -> None:
    machine = Machine.parse(f"{tp}xH200")
    predicted = predict(spec, machine, tp, "phalanx", Workload(INPUT, OUTPUT, CLIENTS))
    load = Load.between(Totals(), served(), INPUT, OUTPUT)
    assert load is not None
    expected = Planned(spec, Gpu.named("H200"), tp).of(load)
    assert expected is not None
    gap = expected.gap
    assert gap.mid == pytest.approx(predicted.tpot.mid, rel=0.1)
    assert gap.low / gap.mid == pytest.approx(predicted.tpot.low / predicted.tpot.mid)


MEASURED = {"llama-3.1-8b": "Llama-3.1-8B", "llama-3.1-8b-fp8": "Llama-3.1-8B-fp8", "qwen3-0.6b": "Qwen3-0.6B"}


def test_the_plan_s_bounds_hold_what_was_measured_on_a_gpu() -> None:
    """Batches of the recorded run on an H200; single requests are faster there than what the plan borrows from."""
    results = Path(__file__).parents[2] / "benchmarks/results/h200.jsonl"
    held = 0
    for row in map(json.loads, results.read_text().splitlines()):
        sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)", row.get("case") or "")
        if row.get("model") not in MEASURED or sizes is None or sizes[1] == "1":
            continue
        rows, inputs, outputs = map(int, sizes.groups())
        load = Load(rows, rows * (inputs + outputs / 2), input_tokens=inputs, output_tokens=outputs)
        expected = Planned(catalog.model(MEASURED[row["model"]]), Gpu.named("NVIDIA H200"), 1).of(load)
        assert expected is not None
        assert expected.gap.low < row["tpot_ms"] / 1e3 < expected.gap.high, row
        held += 1
    assert held >= 6


def test_no_steps_are_no_load() -> None:
    assert Load.between(Totals(steps=5, prompt_tokens=5), Totals(steps=5, prompt_tokens=5), 1, 1) is None


def test_the_driver_s_name_of_a_gpu_finds_its_plan_and_others_are_measured_against_themselves(spec: ModelSpec) -> None:
    planned = expectation(spec, "NVIDIA H200", 2)
    assert planned.kind == "plan"
    assert "2xH200" in planned.source
    for device in ("cpu", "Voodoo 2"):
        baseline = expectation(spec, device, 2)
        assert baseline.kind == "baseline"
        assert "own first" in baseline.source
    assert "Voodoo 2" in baseline.source


def line(load: Load) -> float:
    return 0.010 + 0.002 * load.tokens + 1e-6 * load.context


def gap_of(baseline: Baseline, load: Load) -> Interval:
    expected = baseline.of(load)
    assert expected is not None
    return expected.gap


def loads() -> list[Load]:
    return [Load(decodes, decodes * context) for decodes in (1, 2, 4, 8) for context in (100, 400, 800, 1600)]


def test_a_baseline_finds_the_line_through_what_it_saw() -> None:
    baseline = Baseline("No data sheet.")
    for load in loads():
        baseline.learn(load, line(load))
    asked = Load(6, 6 * 1000)
    gap = gap_of(baseline, asked)
    assert gap.mid == pytest.approx(line(asked), rel=1e-6)
    assert (gap.low, gap.high) == pytest.approx((gap.mid, gap.mid), rel=1e-6)


def test_its_bounds_hold_nine_in_ten_of_what_it_saw() -> None:
    baseline = Baseline("No data sheet.")
    for number in range(SECONDS_A_SIZE):
        baseline.learn(Load(4, 400), 0.1 * (0.5 if number < 2 else 2.0 if number > 57 else 1.0 + number / 1000))
    gap = gap_of(baseline, Load(4, 400))
    assert 0.9 < gap.low / gap.mid <= 1 <= gap.high / gap.mid < 1.2


def test_a_baseline_says_nothing_of_what_it_has_not_seen() -> None:
    baseline = Baseline("No data sheet.")
    for _ in range(9):
        baseline.learn(Load(4, 400), 0.1)
    assert baseline.of(Load(4, 400)) is None
    baseline.learn(Load(4, 400), 0.1)
    assert baseline.of(Load(4, 400)) is not None
    assert baseline.of(Load(64, 6400)) is None
    assert baseline.of(Load(1, 100)) is None


def test_what_becomes_slower_later_does_not_move_the_baseline() -> None:
    baseline = Baseline("No data sheet.")
    for _ in range(SECONDS_A_SIZE):
        baseline.learn(Load(4, 400), 0.1)
    for _ in range(500):
        baseline.learn(Load(5, 500), 0.4)
    gap = gap_of(baseline, Load(4, 400))
    assert gap.mid == pytest.approx(0.1)


def test_no_weight_of_a_baseline_is_below_zero() -> None:
    """More work never makes the expectation shorter, whatever noise was learned from."""
    baseline = Baseline("No data sheet.")
    for number, load in enumerate(loads()):
        baseline.learn(load, 0.1 - 0.004 * number)
    small, large = gap_of(baseline, Load(2, 200)), gap_of(baseline, Load(8, 8000))
    assert large.mid >= small.mid > 0
