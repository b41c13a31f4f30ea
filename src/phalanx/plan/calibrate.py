"""Calibration: fits the numbers of `cost/fitted.json` to files of serving measurements. Needs numpy.

    python -m phalanx.plan.calibrate serving_measurements.csv

First the rates of every engine family, then corrections of what is left. Both are shrunk: rates towards those that all
families share, corrections towards none. Rows far off count less (Cauchy weights), since some measurements are wrong.
Intervals come from predictions of rows that the fit has not seen.
"""

from __future__ import annotations

import argparse
import datetime
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cost.correction import effects
from phalanx.cost.fitted import FITTED_FILE, Fitted, Quantity, Width, write_fitted
from phalanx.cost.price import Rates, RooflineTimes, combine, first_token_seconds
from phalanx.engine.step_sums import StepSums
from phalanx.errors import PhalanxError
from phalanx.plan.measurements import Case, prepare, read_measurements
from phalanx.plan.simulate import Trace, simulate

Array = Any
_FOLDS = 5
_INTERVAL = 0.9
_ROWS_TO_TELL = 30


@dataclass(frozen=True)
class _Start:
    """Where a rate starts, how far (in logarithms) it may well be off, and the most it can be."""

    value: float
    spread: float
    most: float | None = None

    def at(self, shift: Array) -> Array:
        if self.most is None:
            return self.value * np.exp(shift)
        return self.most / (1 + (self.most / self.value - 1) * np.exp(-shift))


_STARTS = {
    "linear_bandwidth": _Start(0.85, 0.3, 1.0),
    "linear_compute": _Start(0.7, 0.5, 1.0),
    "fp8_compute": _Start(0.8, 0.2),
    "expert_bandwidth": _Start(0.7, 0.4, 1.3),
    "expert_compute": _Start(0.5, 0.5, 1.0),
    "expert_bandwidth_power": _Start(0.7, 0.5, 1.0),
    "cache_bandwidth": _Start(0.7, 0.4, 1.0),
    "prompt_attention": _Start(0.4, 0.5, 1.0),
    "all_reduce": _Start(1.0, 0.3),
    "activation_passes": _Start(8.0, 0.6),
    "layer_us": _Start(30.0, 0.8),
    "fp8_layer_us": _Start(10.0, 0.8),
    "sparse_layer_us": _Start(30.0, 1.0),
    "prompt_layer_us": _Start(50.0, 1.0),
    "step_ms": _Start(0.5, 1.0),
    "prompt_step_ms": _Start(1.0, 1.0),
    "row_us": _Start(15.0, 1.0),
    "first_token_ms": _Start(15.0, 1.0),
    "prompt_token_us": _Start(2.0, 1.0),
}
_SHARED_STIFFNESS = 0.3
_FAMILY_STIFFNESS = 1.0
_NOISE = {"tpot": 0.08, "ttft": 0.27}
"""What a logarithm is off by when the rates are right."""
_OUTLIER = {"tpot": 0.12, "ttft": 0.3}
"""Beyond this far off, a row counts less."""
_EFFECT_SPREAD = {
    "tpot": {"family": 0.05, "kind": 0.05, "model": 0.1, "version": 0.1, "gpu": 0.05, "series": 0.06},
    "ttft": {"family": 0.1, "kind": 0.1, "model": 0.2, "version": 0.2, "gpu": 0.1, "series": 0.15},
}
_SLOPE_SPREAD = {
    "tpot": {"slope": 0.06, "model_slope": 0.06},
    "ttft": {"slope": 0.18, "model_slope": 0.18},
}


class Data:
    """Cases with their traces as arrays: every row's TPOT and TTFT is a weighted sum over steps."""

    def __init__(self, cases: Sequence[Case], traces: Sequence[list[tuple[StepSums, float, float]]]) -> None:
        self.cases = list(cases)
        steps = [
            (row, *case.limits.of(step), first, between)
            for row, (case, trace) in enumerate(zip(cases, traces, strict=True))
            for step, first, between in trace
        ]
        columns = np.array(steps, dtype=float).T
        self.row = columns[0].astype(int)
        self.limits = RooflineTimes(*columns[1 : 1 + len(RooflineTimes._fields)])
        self.weights = {"ttft": columns[-2], "tpot": columns[-1]}
        self.prompt_tokens = np.array([case.workload.input_tokens for case in cases], dtype=float)
        self.measured = {
            "tpot": np.log([case.measurement.tpot for case in cases]),
            "ttft": np.log([case.measurement.ttft for case in cases]),
        }
        self.families = sorted({case.profile.family for case in cases})
        self.family = np.array([self.families.index(case.profile.family) for case in cases])

    def subset(self, rows: Array) -> Data:
        """Only these rows."""
        part = object.__new__(Data)
        part.cases = [self.cases[row] for row in rows]
        place = np.full(len(self.cases), -1)
        place[rows] = np.arange(len(rows))
        chosen = place[self.row] >= 0
        part.row = place[self.row[chosen]]
        part.limits = RooflineTimes(*(np.asarray(column)[chosen] for column in self.limits))
        part.weights = {name: weight[chosen] for name, weight in self.weights.items()}
        part.prompt_tokens = self.prompt_tokens[rows]
        part.measured = {name: values[rows] for name, values in self.measured.items()}
        part.families, part.family = self.families, self.family[rows]
        return part

    def predict(self, shifts: Array) -> dict[str, Array]:
        """Logarithms of TPOT and TTFT when the rates of every row are shifted so (rows x rates)."""
        by_row = Rates(*(start.at(shifts[:, index]) for index, start in enumerate(_STARTS.values())))
        cost = combine(self.limits, Rates(*(np.asarray(rate)[self.row] for rate in by_row))).total
        rows = len(self.cases)
        first = np.bincount(self.row, cost * self.weights["ttft"], rows)
        return {
            "tpot": np.log(np.bincount(self.row, cost * self.weights["tpot"], rows)),
            "ttft": np.log(first + first_token_seconds(by_row, self.prompt_tokens)),
        }


def summarise(trace: Trace) -> list[tuple[StepSums, float, float]]:
    """Steps that are alike as one, with their weights in the mean TTFT and the mean TPOT."""
    ttft, tpot = trace.step_weights()
    alike: dict[tuple[int, ...], list[tuple[StepSums, float, float]]] = {}
    for step, first, between in zip(trace.steps, ttft, tpot, strict=True):
        if first > 0 or between > 0:
            alike.setdefault(_likeness(step), []).append((step, first, between))
    return [_mean_step(group) for group in alike.values()]


def _likeness(step: StepSums) -> tuple[int, ...]:
    sizes = (step.decodes, 0.05), (step.prompt_tokens, 0.04), (step.context, 0.4), (step.prompt_pairs, 0.4)
    return (min(step.prompts, 3), *(round(float(np.log1p(size)) / grain) for size, grain in sizes))


def _mean_step(group: list[tuple[StepSums, float, float]]) -> tuple[StepSums, float, float]:
    firsts, betweens = sum(first for _, first, _ in group), sum(between for *_, between in group)
    shares = [first / (firsts or 1.0) + between / (betweens or 1.0) for _, first, between in group]
    total = sum(shares)

    def mean(name: str) -> float:
        return sum(getattr(step, name) * share for (step, *_), share in zip(group, shares, strict=True)) / total

    fields = ("decodes", "context", "prompt_tokens", "prompt_pairs", "prompts")
    return StepSums(*(mean(name) for name in fields)), firsts, betweens  # type: ignore[arg-type]


def load_data(cases: Sequence[Case]) -> Data:
    """Simulate what the cases need, each closed loop once."""
    known: dict[Any, list[tuple[StepSums, float, float]]] = {}
    for case in cases:
        if case.trace_key not in known:
            known[case.trace_key] = summarise(simulate(*case.trace_key))
    return Data(cases, [known[case.trace_key] for case in cases])


@dataclass
class Calibration:
    """Rates as shifts of their starts (shared, then one row a family) and effects by quantity."""

    families: list[str]
    shared: Array
    apart: Array
    effects: dict[str, dict[str, float]]

    def shifts(self, data: Data) -> Array:
        return self.shared + self.apart[data.family]

    def predict(self, data: Data) -> dict[str, Array]:
        """Logarithms of corrected TPOT and TTFT."""
        found = data.predict(self.shifts(data))
        return {name: values + self._corrections(name, data) for name, values in found.items()}

    def _corrections(self, quantity: str, data: Data) -> Array:
        known = self.effects[quantity]
        return np.array(
            [
                sum(strength * known.get(f"{kind}:{name}", 0.0) for kind, name, strength in effects(case.traits))
                for case in data.cases
            ]
        )

    def rates(self) -> dict[str, dict[str, float]]:
        return {
            family: {
                name: float(start.at(self.shared[index] + self.apart[number, index]))
                for index, (name, start) in enumerate(_STARTS.items())
            }
            for number, family in enumerate(self.families)
        }


def calibrate(data: Data) -> Calibration:
    """Fit rates, then effects on what they leave."""
    shared, apart = _fit_rates(data)
    left = data.predict(shared + apart[data.family])
    found = {name: _fit_effects(name, data, data.measured[name] - left[name]) for name in ("tpot", "ttft")}
    return Calibration(data.families, shared, apart, found)


def _fit_rates(data: Data, most_rounds: int = 25) -> tuple[Array, Array]:
    """Damped Gauss-Newton. A family's own shift moves its rows as the shared one does: one Jacobian serves both."""
    count, families = len(_STARTS), len(data.families)
    spreads = np.array([start.spread for start in _STARTS.values()])
    stiffness = np.concatenate([_SHARED_STIFFNESS / spreads, np.tile(_FAMILY_STIFFNESS / spreads, families)])
    at, damping = np.zeros(count * (1 + families)), 1.0

    def residuals(point: Array) -> Array:
        found = data.predict(point[:count] + point[count:].reshape(families, count)[data.family])
        return np.concatenate([(found[name] - data.measured[name]) / _NOISE[name] for name in ("tpot", "ttft")])

    scale = np.repeat([_OUTLIER[name] / _NOISE[name] for name in ("tpot", "ttft")], len(data.cases))
    off = residuals(at)
    for _ in range(most_rounds):
        weight = 1 / (1 + (off / scale) ** 2)
        loss = weight @ off**2 + np.sum((at * stiffness) ** 2)
        jacobian = _jacobian(data, residuals, at, off, count)
        curvature = jacobian.T @ (jacobian * weight[:, None]) + np.diag(stiffness**2)
        slope = jacobian.T @ (weight * off) + stiffness**2 * at
        for _ in range(8):
            move = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -slope)
            there = at + np.clip(move, -0.7, 0.7)
            tried = residuals(there)
            improved = weight @ tried**2 + np.sum((there * stiffness) ** 2)
            if improved < loss:
                break
            damping *= 4
        else:
            break
        at, off, damping = there, tried, max(damping / 5, 1e-4)
        if loss - improved < 2e-4 * loss:
            break
    return at[:count], at[count:].reshape(families, count)


def _jacobian(data: Data, residuals: Any, at: Array, off: Array, count: int) -> Array:
    shared = np.empty((len(off), count))
    for index in range(count):
        moved = at.copy()
        moved[index] += 1e-4
        shared[:, index] = (residuals(moved) - off) / 1e-4
    family = np.tile(data.family, 2)
    return np.hstack([shared, *(shared * (family == number)[:, None] for number in range(len(data.families)))])


def _fit_effects(quantity: str, data: Data, left: Array, rounds: int = 8) -> dict[str, float]:
    """Ridge regression of what is left, each kind of effect with its own spread."""
    spreads = {**_EFFECT_SPREAD[quantity], **_SLOPE_SPREAD[quantity]}
    names: dict[str, int] = {}
    stiff: list[float] = []
    entries = []
    for row, case in enumerate(data.cases):
        for kind, name, strength in effects(case.traits):
            column = names.setdefault(f"{kind}:{name}", len(names))
            if column == len(stiff):
                stiff.append(1 / spreads[kind])
            entries.append((row, column, strength))
    design = np.zeros((len(data.cases), len(names)))
    for row, column, strength in entries:
        design[row, column] = strength
    noise, outlier = _NOISE[quantity], _OUTLIER[quantity]
    found = np.zeros(len(names))
    for _ in range(rounds):
        weight = 1 / (1 + ((left - design @ found) / outlier) ** 2) / noise**2
        curvature = design.T @ (design * weight[:, None]) + np.diag(np.array(stiff) ** 2)
        found = np.linalg.solve(curvature, design.T @ (weight * left))
    return {name: float(found[column]) for name, column in names.items()}


def fold_of(cases: Sequence[Case], folds: int, seed: int | None = None) -> Array:
    """The fold of every row; rows of one series (engine, GPU, model, TP) share theirs.

    Series are dealt in order, so that those of one engine and model are spread over the folds; with a seed, shuffled.
    """
    series = sorted({case.measurement.series for case in cases})
    if seed is not None:
        random.Random(seed).shuffle(series)
    number = {name: place % folds for place, name in enumerate(series)}
    return np.array([number[case.measurement.series] for case in cases])


def cross_validate(data: Data, folds: int = _FOLDS, seed: int | None = None) -> dict[str, Array]:
    """Logarithms of TPOT and TTFT of every row, each by a calibration that has not seen its series."""
    fold = fold_of(data.cases, folds, seed)
    found = {name: np.empty(len(data.cases)) for name in ("tpot", "ttft")}
    for number in range(folds):
        seen, unseen = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        if len(unseen):
            predicted = calibrate(data.subset(seen)).predict(data.subset(unseen))
            for name, values in predicted.items():
                found[name][unseen] = values
    return found


def widths(cases: Sequence[Case], off: Array) -> Width:
    """Half-widths that hold nine in ten of these errors; a family's own as far as it has rows to tell."""
    overall = float(np.quantile(np.abs(off), _INTERVAL))
    families: dict[str, float] = {}
    for family in sorted({case.traits.family for case in cases}):
        own = np.abs(off[[case.traits.family == family for case in cases]])
        share = len(own) / (len(own) + _ROWS_TO_TELL)
        families[family] = float(share * np.quantile(own, _INTERVAL) + (1 - share) * overall)
    return Width(overall, families)


def held_out(cases: Sequence[Case], folds: int) -> list[tuple[Case, tuple[float, float], tuple[float, float]]]:
    """Every case with (logarithm, half-width) of TPOT and TTFT, neither of which has seen the row's series."""
    data = load_data(cases)
    found, fold = cross_validate(data, folds), fold_of(cases, folds)
    bounds = {name: np.empty(len(cases)) for name in found}
    for name, values in found.items():
        off = values - data.measured[name]
        for number in range(folds):
            others = np.flatnonzero(fold != number).tolist()
            width = widths([cases[row] for row in others], off[others])
            for row in np.flatnonzero(fold == number).tolist():
                bounds[name][row] = width.families.get(cases[row].traits.family, width.overall)
    columns = (zip(found[name].tolist(), bounds[name].tolist(), strict=True) for name in ("tpot", "ttft"))
    return list(zip(cases, *columns, strict=True))


def fit_files(paths: Sequence[Path], folds: int = _FOLDS) -> Fitted:
    """The numbers to ship: rates and corrections from all rows, intervals from rows held out."""
    cases = []
    for path in paths:
        for measurement in read_measurements(path):
            try:
                cases.append(prepare(measurement))
            except PhalanxError as error:
                print(f"left out: {measurement}: {error.found}")
    data = load_data(cases)
    return to_fitted(data, ", ".join(path.name for path in paths), folds)


def to_fitted(data: Data, source: str, folds: int = _FOLDS) -> Fitted:
    whole, found = calibrate(data), cross_validate(data, folds)
    quantities = {
        name: Quantity(
            {key: round(value, 5) for key, value in sorted(whole.effects[name].items()) if abs(value) >= 5e-4},
            widths(data.cases, found[name] - data.measured[name]),
        )
        for name in ("tpot", "ttft")
    }
    return Fitted(
        source=source,
        date=datetime.date.today().isoformat(),
        rows=len(data.cases),
        models=sorted({f"{case.traits.family}/{case.traits.model}" for case in data.cases}),
        gpus=sorted({case.traits.gpu for case in data.cases}),
        rates={
            family: {name: float(f"{value:.6g}") for name, value in rates.items()}
            for family, rates in whole.rates().items()
        },
        **quantities,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the cost model to files of serving measurements.")
    parser.add_argument("files", nargs="+", type=Path, help="CSV files with the columns of serving_measurements.csv")
    parser.add_argument("--output", type=Path, default=FITTED_FILE, help="where to write the fitted numbers")
    given = parser.parse_args()
    fitted = fit_files(given.files)
    write_fitted(fitted, given.output)
    tpot, ttft = fitted.tpot.width.overall, fitted.ttft.width.overall
    print(f"{fitted.rows} rows; 90 % half-widths (logarithms): TPOT {tpot:.3f}, TTFT {ttft:.3f}")


if __name__ == "__main__":
    main()
