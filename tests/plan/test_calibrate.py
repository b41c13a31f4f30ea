"""Calibration finds the numbers that made the measurements, and never looks at what it is tested on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from phalanx.cost.fitted import load_fitted, write_fitted  # noqa: E402
from phalanx.engine.step_sums import StepSums  # noqa: E402
from phalanx.plan.calibrate import calibrate  # noqa: E402
from phalanx.plan.cases import Case, prepare  # noqa: E402
from phalanx.plan.fit_data import STARTS, Data, load_data, summarise  # noqa: E402
from phalanx.plan.held_out import bounds, cross_validate, fold_of, new_pairs, to_fitted, widths  # noqa: E402
from phalanx.plan.measurements import Measurement  # noqa: E402
from phalanx.plan.ridge import Sparse, solve_ridge  # noqa: E402
from phalanx.plan.simulate import simulate  # noqa: E402

MODELS = ("Llama-3.1-8B", "Llama-3.3-70B")


def cases() -> list[Case]:
    """Two models on one to eight cards, small loads: quick to simulate."""
    return [
        prepare(Measurement("vllm", "0.10.2", gpu, tp, 1, model, "fp8", "bf16", tokens, 64, clients, 1.0, 1.0))
        for model in MODELS
        for gpu in ("H100-SXM", "H200-SXM")
        for tp in (1, 2, 4, 8)
        for tokens, clients in ((256, 1), (256, 8), (1024, 4), (2048, 2))
    ]


def measured_with(data: Data, shifts: dict[str, float], bump: dict[str, float] | None = None) -> Data:
    """The same cases as if rates were shifted so, and a model's TPOT by a factor of its own."""
    shift = np.array([shifts.get(name, 0.0) for name in STARTS])
    found = data.predict(np.tile(shift, (len(data.cases), 1)))
    for row, case in enumerate(data.cases):
        found["tpot"][row] += (bump or {}).get(case.measurement.model, 0.0)
    data.measured = found
    return data


@pytest.fixture(scope="module")
def plain() -> Data:
    return load_data(cases())


def off(data: Data, predicted: dict[str, object], name: str) -> float:
    return float(np.median(np.abs(np.asarray(predicted[name]) - data.measured[name])))


def test_a_faster_engine_is_recognised(plain: Data) -> None:
    data = measured_with(plain, {"linear_bandwidth": 1.0, "layer_us": -1.0, "first_token_ms": 1.0})
    found = calibrate(data)
    assert off(data, found.predict(data), "tpot") < 0.01
    assert off(data, found.predict(data), "ttft") < 0.03
    rates = found.rates()["vllm-0.10"]
    assert rates["linear_bandwidth"] > 0.88
    assert rates["layer_us"] < 20


def test_unseen_series_follow_from_the_seen(plain: Data) -> None:
    data = measured_with(plain, {"linear_bandwidth": 0.5, "cache_bandwidth": -0.5, "layer_us": 0.5})
    assert off(data, cross_validate(data), "tpot") < 0.02


def test_what_rates_cannot_say_becomes_a_correction(plain: Data) -> None:
    data = measured_with(plain, {}, {"Llama-3.1-8B": 0.3})
    found = calibrate(data)
    assert off(data, found.predict(data), "tpot") < 0.02
    assert off(data, data.predict(found.shifts(data)), "tpot") > off(data, found.predict(data), "tpot")


def test_wild_rows_do_not_lead_astray(plain: Data) -> None:
    data = measured_with(plain, {})
    honest = np.arange(len(data.cases)) % 5 != 0
    data.measured["tpot"][~honest] += 2.0
    rates_alone = data.predict(calibrate(data).shifts(data))["tpot"] - data.measured["tpot"]
    assert np.median(np.abs(rates_alone[honest])) < 0.03


def test_series_stay_whole_and_neighbours_part() -> None:
    rows = cases()
    fold = fold_of(rows, 4)
    by_series = {row.measurement.series: set() for row in rows}
    for row, number in zip(rows, fold, strict=True):
        by_series[row.measurement.series].add(int(number))
    assert all(len(numbers) == 1 for numbers in by_series.values())
    degrees = [by_series["vllm", "H100-SXM", "Llama-3.1-8B", tp] for tp in (1, 2, 4, 8)]
    assert len(set.union(*degrees)) == 4
    assert (fold_of(rows, 4, seed=1) != fold).any()


def test_a_fold_is_predicted_without_its_rows(plain: Data) -> None:
    """If the held-out rows were seen, doubling them would show in their own prediction."""
    data = measured_with(plain, {})
    before = cross_validate(data, 4)["tpot"]
    chosen = fold_of(data.cases, 4) == 0
    data.measured["tpot"][chosen] += 0.7
    after = cross_validate(data, 4)["tpot"]
    assert np.allclose(before[chosen], after[chosen], atol=1e-6)
    assert not np.allclose(before[~chosen], after[~chosen], atol=1e-3)


def test_a_summary_weighs_as_the_trace_does() -> None:
    case = cases()[1]
    trace = simulate(*case.trace_key)

    def price(step: StepSums) -> float:
        return 0.01 + 1e-4 * step.prompt_tokens + 1e-3 * step.decodes + 1e-6 * step.context

    times, steps = trace.times(price), summarise(trace)
    assert len(steps) < len(trace.steps)
    assert sum(price(step) * first for step, first, _ in steps) == pytest.approx(times.mean_ttft, rel=0.01)
    assert sum(price(step) * between for step, _, between in steps) == pytest.approx(times.mean_tpot, rel=0.01)


def test_bounds_hold_nine_in_ten(plain: Data) -> None:
    rows = plain.cases
    errors = np.random.default_rng(0).normal(0, 0.1, len(rows))
    width = widths(rows, errors, np.arange(len(rows)) % 4)
    assert 0.9 <= np.mean(np.abs(errors) <= width.overall) < 0.96
    assert width.families.keys() == {"vllm-0.10"}


def test_a_small_publisher_counts_as_much_as_a_large_one(plain: Data) -> None:
    """Of 60 rows within 1 % and 4 that are 50 % off, nine in ten rows are within 1 %, half of the publishers not."""
    errors, group = np.full(len(plain.cases), 0.01), np.zeros(len(plain.cases))
    errors[:4], group[:4] = 0.5, 1
    assert widths(plain.cases, errors, np.zeros(len(plain.cases))).overall == 0.01
    assert widths(plain.cases, errors, group).overall == 0.5


def test_an_engine_that_was_never_seen_on_an_architecture_is_less_certain(plain: Data) -> None:
    """Folds by card: one of them is all there is of Blackwell."""
    row = replace(plain.cases[0].measurement, gpu="B200")
    rows = [*plain.cases[:30], *[prepare(row)] * 6]
    fold = np.array([index % 2 for index in range(30)] + [2] * 6)
    assert new_pairs(rows, fold).tolist() == [False] * 30 + [True] * 6
    data = load_data(rows)
    found = {name: values + 0.1 for name, values in data.measured.items()}
    half = bounds(data, found, fold)["tpot"]
    assert half[:30] == pytest.approx(0.1)
    assert half[30:] == pytest.approx(0.25)


def test_a_model_that_was_never_seen_is_less_certain(plain: Data) -> None:
    """Two models in each of two folds, and one in the third alone."""
    fold = np.array([index % 2 for index in range(len(plain.cases))])
    row = replace(plain.cases[0].measurement, model="Qwen2.5-7B", precision="bf16")
    data = load_data([*plain.cases, *[prepare(row)] * 3])
    found = {name: values + 0.1 for name, values in data.measured.items()}
    half = bounds(data, found, np.append(fold, [2] * 3))["tpot"]
    assert half[:-3] == pytest.approx(0.1)
    assert half[-3:] == pytest.approx(0.14)


def test_versions_of_an_engine_tell_of_each_other(plain: Data) -> None:
    """Half as many microseconds a layer in one version of vLLM: expected of another version, and less of SGLang."""
    rows = [case.measurement for case in plain.cases]
    others = [replace(rows[0], version="0.18.0"), replace(rows[0], engine="sglang", version="0.5.9")]
    data = load_data([*plain.cases, *(prepare(row) for row in others)])
    data = measured_with(data, {"layer_us": -0.7, "step_ms": -0.7})
    rates = calibrate(data.subset(np.arange(len(rows)))).rates()
    assert rates["vllm-0.10"]["layer_us"] == pytest.approx(rates["vllm-0.18"]["layer_us"], rel=0.05)
    assert rates["vllm-0.18"]["layer_us"] < rates["sglang-0.5.9"]["layer_us"]


def test_old_kernels_teach_nothing(plain: Data) -> None:
    """Rows of vLLM 0.7 on MI300X, fifty times too slow, change no number; of 0.10 they do."""
    row = replace(plain.cases[0].measurement, gpu="MI300X", precision="bf16")
    seen = {}
    for version in ("0.7.3", "0.10.2"):
        data = load_data([*plain.cases, *[prepare(replace(row, version=version))] * 3])
        data = measured_with(data, {})
        data.measured["tpot"][-3:] += 4.0
        seen[version] = calibrate(data).effects["tpot"].get("card:MI300X", 0.0)
    assert seen["0.7.3"] == 0.0
    assert seen["0.10.2"] > 0.01


def test_what_is_the_host_s_is_the_same_on_every_card(plain: Data) -> None:
    found = calibrate(plain)
    shifts = dict(zip(STARTS, abs(found.hardware).max(axis=0).tolist(), strict=True))
    assert shifts["prompt_layer_us"] < 1e-3
    assert max(shifts.values()) > 0.01


@pytest.mark.parametrize(("overlaps", "is_native", "sent"), [(0.0, 0.0, 0.0), (1.0, 0.0, 2e-3), (0.0, 1.0, 0.0)])
def test_slopes_are_what_a_small_shift_does(
    plain: Data, overlaps: float, is_native: float, sent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    habits = {"overlaps": overlaps, "is_native": is_native, "sent": sent}
    every = {name: np.full(len(plain.row), value) for name, value in habits.items()}
    monkeypatch.setattr(plain, "limits", plain.limits._replace(**every))
    shifts = np.random.default_rng(3).normal(0, 0.4, (len(plain.cases), len(STARTS)))
    here, slopes = plain.predict(shifts), plain.slopes(shifts)
    for index, name in enumerate(STARTS):
        moved = shifts.copy()
        moved[:, index] += 1e-5
        for quantity, values in plain.predict(moved).items():
            assert (values - here[quantity]) / 1e-5 == pytest.approx(slopes[quantity][:, index], abs=1e-4), name


def test_effects_are_those_of_a_dense_regression() -> None:
    chance = np.random.default_rng(5)
    dense = chance.normal(size=(40, 30)) * (chance.random((40, 30)) < 0.2)
    rows, columns = np.nonzero(dense)
    sparse = Sparse(rows, columns, dense[rows, columns], *dense.shape)
    weight, stiff, target = chance.random(40), chance.random(30) + 0.1, chance.normal(size=40)
    wanted = np.linalg.solve(dense.T @ (dense * weight[:, None]) + np.diag(stiff), dense.T @ (weight * target))
    assert solve_ridge(sparse, weight, stiff, target, np.zeros(30)) == pytest.approx(wanted, abs=1e-4)


def test_fitted_numbers_are_written_and_read(plain: Data, tmp_path: Path) -> None:
    fitted = to_fitted(measured_with(plain, {}), "made up", folds=2)
    write_fitted(fitted, tmp_path / "fitted.json")
    assert load_fitted(tmp_path / "fitted.json") == fitted
    assert fitted.rows == len(plain.cases)
    assert fitted.gpus == ["H100-SXM", "H200-SXM"]
    assert replace(plain.cases[0]).traits.family in fitted.rates
