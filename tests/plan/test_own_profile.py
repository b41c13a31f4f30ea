"""A profile of Phalanx on one GPU: fitted to what was measured there, found again by the plan, and by nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

np = pytest.importorskip("numpy")

from phalanx.bench import calibrate  # noqa: E402
from phalanx.cli import app  # noqa: E402
from phalanx.cost.fitted import Fitted, fitted_for, load_fitted, own_file, write_fitted  # noqa: E402
from phalanx.models import catalog  # noqa: E402
from phalanx.plan.cases import prepare  # noqa: E402
from phalanx.plan.evaluate import evaluate, predict_burst  # noqa: E402
from phalanx.plan.measurements import Measurement  # noqa: E402
from phalanx.plan.own_profile import fit_profile  # noqa: E402
from phalanx.plan.predict import Predictor, predict  # noqa: E402
from phalanx.spec.machine import Gpu, Machine  # noqa: E402

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASES = [(batch, inputs) for batch in (1, 64) for inputs in (128, 1024)]


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_PROFILES", str(tmp_path))
    return tmp_path


def measured_by(truth: Fitted) -> list[Measurement]:
    """What a machine would measure on which these numbers are true."""
    found = []
    for model in ("Llama-3.1-8B", "Qwen3-30B-A3B"):
        for batch, inputs in CASES:
            row = Measurement(
                "phalanx", "", "L40S", 1, 1, model, "fp8", "bf16", inputs, 97, batch, 1.0, 1.0,
                spread=0.0, requests=batch, kind="burst", publisher="phalanx",
            )  # fmt: skip
            case = prepare(row)
            told = predict_burst(case, Predictor(case.limits, case.traits, truth))
            assert told.tpot is not None
            assert told.ttft is not None
            found.append(replace(row, tpot=told.tpot.mid, ttft=told.ttft.mid))
    return found


def slower(factor: float) -> Fitted:
    """Phalanx on a machine whose launches and reads take `factor` as long as it comes with."""
    shipped = load_fitted()
    rates = dict(shipped.family_rates("phalanx", "Ada")._asdict())
    rates["linear_bandwidth"] /= factor
    for name in ("layer_us", "step_ms", "sparse_layer_us"):
        rates[name] *= factor
    return Fitted(
        "", "", 0, shipped.models, shipped.gpus, shipped.publishers, {"phalanx": rates}, shipped.tpot, shipped.ttft
    )


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    return measured_by(slower(1.6))


@pytest.fixture(scope="module")
def fitted(rows: list[Measurement]) -> Fitted:
    return fit_profile(rows)


def test_a_profile_says_what_was_measured_and_the_plan_goes_by_it(rows: list[Measurement], fitted: Fitted) -> None:
    off = []
    for row in rows:
        case = prepare(row)
        shipped, own = (
            predict_burst(case, Predictor(case.limits, case.traits, known)) for known in (load_fitted(), fitted)
        )
        assert own.tpot.mid == pytest.approx(row.tpot, rel=0.05)
        assert own.ttft.mid == pytest.approx(row.ttft, rel=0.15)
        off.append([abs(np.log(told.tpot.mid / row.tpot)) for told in (shipped, own)])
    shipped_off, own_off = np.mean(off, axis=0)
    assert own_off < shipped_off / 5
    spec, machine = catalog.model("Llama-3.1-8B"), Machine((Gpu.named("L40S"),))
    before = predict(spec, machine, 1, "phalanx").tpot
    write_fitted(fitted, own_file("L40S"))
    after = predict(spec, machine, 1, "phalanx").tpot
    assert after.mid > 1.15 * before.mid
    assert after.high / after.mid < before.high / before.mid


def test_other_engines_and_other_gpus_go_by_what_the_product_comes_with(fitted: Fitted) -> None:
    write_fitted(fitted, own_file("L40S"))
    assert fitted_for("phalanx", "L40S") is not load_fitted()
    assert fitted_for("vllm", "L40S") is load_fitted()
    assert fitted_for("phalanx", "L4") is load_fitted()


@pytest.mark.usefixtures("unsteady_figures")
def test_the_command_measures_fits_and_writes(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> None:
    monkeypatch.setattr(calibrate, "calibration_gpu", lambda config: Gpu.named("L40S"))
    told = CliRunner().invoke(app, ["calibrate", str(tiny_llama), "--cases", "1x8x9,4x8x9,4x64x9,9x900000x9"])
    assert told.exit_code == 0, told.output
    assert "L40S, TP=1: " in told.output
    written = load_fitted(profiles / "L40S.json")
    assert (written.gpus, written.publishers) == (["L40S"], ["", "phalanx"])
    assert 1 <= written.rows <= 3


def test_a_cpu_is_refused(tiny_llama: Path) -> None:
    told = CliRunner().invoke(app, ["calibrate", str(tiny_llama)])
    assert told.exit_code == 1
    assert "no data sheet of CPUs" in told.output


@pytest.mark.parametrize(("name", "most_off"), [("h200", 0.05), ("h200_frontier", 0.15)])
def test_every_case_on_the_h200_is_met_by_what_ships(name: str, most_off: float) -> None:
    """TPOT and tokens a second, those of other families less closely, and TTFT within 15 %."""
    found = evaluate(RESULTS / f"{name}.jsonl")
    rows = found.rows
    assert (len(rows) > 15, found.bad) == (True, ())
    for quantity, most in (("tpot", most_off), ("throughput", most_off), ("ttft", 0.15)):
        pairs = [(getattr(row, quantity), getattr(row.measurement, quantity)) for row in rows]
        off = [abs(told.mid / measured - 1) for told, measured in pairs if told and measured]
        assert max(off, default=0.0) < most, quantity
        if quantity == "tpot":
            assert np.median(off) < 0.02
