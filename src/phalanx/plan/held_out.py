"""What a fit says of rows that it has not seen, and the numbers to ship with the intervals that follow. Needs numpy.

python -m phalanx.plan.held_out serving_measurements.csv blackwell_measurements.csv ...
"""

from __future__ import annotations

import argparse
import datetime
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from phalanx.cost.fitted import FITTED_FILE, Fitted, Quantity, Width, pair_of, write_fitted
from phalanx.errors import PhalanxError
from phalanx.plan.calibrate import calibrate, tells_of_today
from phalanx.plan.cases import Case, prepare
from phalanx.plan.fit_data import QUANTITIES, Array, Data, load_data
from phalanx.plan.measurements import read_measurements

FOLDS = 5
ALWAYS_SEEN = -1
_INTERVAL = 0.9
_ROWS_TO_TELL = 30
_GROUPS_TO_TELL = 3
_UNSEEN_PAIR = 2.5
"""How much wider an interval is at least where an engine was never seen on an architecture: a rule of thumb."""


def fold_of(cases: Sequence[Case], folds: int, seed: int | None = None) -> Array:
    """The fold of every row; rows of one series (engine, GPU, model, TP) share theirs.

    Series are dealt in order, so that those of one engine and model are spread over the folds; with a seed, shuffled.
    """
    series = sorted({case.measurement.series for case in cases})
    if seed is not None:
        random.Random(seed).shuffle(series)
    number = {name: place % folds for place, name in enumerate(series)}
    return np.array([number[case.measurement.series] for case in cases])


GROUPS: dict[str, Callable[[Case], str]] = {
    "publisher": lambda case: case.measurement.publisher,
    "gpu": lambda case: case.traits.gpu,
    "family": lambda case: case.traits.model,
}
"""Of what a whole one can be left out at a time: who measured, the card, the family of models."""


def group_of(cases: Sequence[Case], what: str, folds: int | None = None) -> Array:
    """The fold of every row when a whole publisher, GPU or family is left out at a time, or so many at once that there
    are no more than `folds`.
    """
    names = [GROUPS[what](case) for case in cases]
    number = {name: place % (folds or len(names)) for place, name in enumerate(sorted(set(names)))}
    return np.array([number[name] for name in names])


def predict_unseen(data: Data, fold: Array) -> dict[str, Array]:
    """Logarithms of TPOT and TTFT of every row by a calibration that has not seen its fold; NaN for rows that are
    always seen.
    """
    found = {name: np.full(len(data.cases), np.nan) for name in QUANTITIES}
    for number in np.unique(fold[fold != ALWAYS_SEEN]):
        seen, unseen = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        predicted = calibrate(data.subset(seen)).predict(data.subset(unseen))
        for name, values in predicted.items():
            found[name][unseen] = values
    return found


def cross_validate(data: Data, folds: int = FOLDS, seed: int | None = None) -> dict[str, Array]:
    """The same over folds of whole series."""
    return predict_unseen(data, fold_of(data.cases, folds, seed))


def widths(cases: Sequence[Case], off: Array, group: Array) -> Width:
    """Half-widths that hold nine in ten of these errors; a family's own as far as it has rows and groups to tell. Rows
    of a group (a publisher, a GPU) share what is wrong with them, so every group counts the same.
    """
    overall = _quantile(off, group)
    families: dict[str, float] = {}
    for family in sorted({case.traits.family for case in cases}):
        own = np.array([case.traits.family == family for case in cases]) & np.isfinite(off)
        count, groups = int(own.sum()), len(np.unique(group[own]))
        share = min(count / (count + _ROWS_TO_TELL), groups / (groups + _GROUPS_TO_TELL))
        families[family] = share * _quantile(off[own], group[own]) + (1 - share) * overall if count else overall
    return Width(overall, families)


def _quantile(off: Array, group: Array) -> float:
    """Nine in ten of what is known, each group as a whole; one row more than a share of few, as conformal intervals
    take it.
    """
    known = np.isfinite(off)
    if not known.any():
        return 0.0
    sizes, group = np.abs(off[known]), group[known]
    order = np.argsort(sizes)
    _, place, counts = np.unique(group, return_inverse=True, return_counts=True)
    reached = np.cumsum((1 / counts[place])[order]) / len(counts)
    wanted = _INTERVAL * (1 + 1 / len(sizes))
    return float(sizes[order][min(len(sizes) - 1, int(np.searchsorted(reached, wanted - 1e-9)))])


def bounds(data: Data, found: dict[str, Array], fold: Array) -> dict[str, Array]:
    """Half-widths for every row from the errors of the other folds: of rows whose engine was seen on their architecture
    as little as on this row's, and wider for a model that was not seen. Each error is that of a fit without its own
    fold.
    """
    is_new = new_pairs(data.cases, fold)
    is_model_new = _alone(np.array([case.traits.model for case in data.cases]), fold)
    wide = {name: np.full(len(data.cases), np.nan) for name in found}
    for name, values in found.items():
        off = values - data.measured[name]
        for number in np.unique(fold[fold != ALWAYS_SEEN]):
            others = (fold != number) & (fold != ALWAYS_SEEN)
            seen = np.flatnonzero(others & ~is_new).tolist()
            width = widths([data.cases[row] for row in seen], off[seen], fold[seen])
            unseen, strange = others & is_new, others & is_model_new & ~is_new
            new = max(_UNSEEN_PAIR * width.overall, _quantile(off[unseen], fold[unseen]))
            model = max(_USUALLY_WIDER["model"] * width.overall, _quantile(off[strange], fold[strange]))
            for row in np.flatnonzero(fold == number).tolist():
                own = width.families.get(data.cases[row].traits.family, width.overall)
                wide[name][row] = new if is_new[row] else max(own, model) if is_model_new[row] else own
    return wide


def new_pairs(cases: Sequence[Case], fold: Array) -> Array:
    """Rows whose engine ran on their architecture in no row outside their fold."""
    return _alone(np.array([pair_of(case.traits) for case in cases]), fold)


def _alone(names: Array, fold: Array) -> Array:
    """Rows of a name that no row outside their fold has."""
    spread = {name: np.unique(fold[names == name]) for name in np.unique(names)}
    return np.array([len(spread[name]) == 1 for name in names]) & (fold != ALWAYS_SEEN)


def read_cases(paths: Iterable[Path]) -> list[Case]:
    """All rows that can be predicted, but those with drafts, which are never fitted; the others are named."""
    cases = []
    for path in paths:
        reading = read_measurements(path)
        for bad in reading.bad:
            print(f"left out: {path.name}, line {bad.line}: {bad.problem}")
        for measurement in reading.measurements:
            try:
                case = prepare(measurement)
                if not measurement.speculates:
                    cases.append(case)
            except PhalanxError as error:
                print(f"left out: {measurement}: {error.found}")
    return cases


def predict_cases(
    cases: Sequence[Case], folds: int | None, leave_out: str | None, beside: Sequence[Case]
) -> list[tuple[Case, tuple[float, float], tuple[float, float]]]:
    """Every case with (logarithm, half-width) of TPOT and TTFT from fits without its series, or without a whole group.

    Cases `beside` are fitted but not told, and where they belong to a group that is left out, they are left out too.
    """
    data = load_data([*cases, *beside])
    fold = group_of(data.cases, leave_out) if leave_out is not None else fold_of(data.cases, folds or FOLDS)
    if leave_out is None:
        fold[len(cases) :] = ALWAYS_SEEN
    else:
        fold = np.where(np.isin(fold, fold[: len(cases)]), fold, ALWAYS_SEEN)
    found = predict_unseen(data, fold)
    wide = bounds(data, found, fold)
    columns = (zip(found[name].tolist(), wide[name].tolist(), strict=True) for name in QUANTITIES)
    return list(zip(data.cases, *columns, strict=True))[: len(cases)]


def to_fitted(data: Data, source: str, folds: int = FOLDS, leave_out: Sequence[str] = ()) -> Fitted:
    """Rates and corrections from all rows, intervals from fits that have not seen the row's series, or a whole one of
    these: each publisher by itself, the others some at a time. What is not left out widens by its usual factor.
    """
    whole = calibrate(data)
    series = fold_of(data.cases, folds)
    found = predict_unseen(data, series)
    groups = {what: group_of(data.cases, what, None if what == "publisher" else folds) for what in leave_out}
    new = {what: predict_unseen(data, group) for what, group in groups.items()}
    quantities = {}
    for name in QUANTITIES:
        width = widths(data.cases, found[name] - data.measured[name], series)
        unseen = {what: factor * width.overall for what, factor in _USUALLY_WIDER.items()}
        for what in leave_out:
            off, is_new = new[what][name] - data.measured[name], new_pairs(data.cases, groups[what])
            group = groups[what]
            unseen[_NEW[what]] = round(_quantile(off[~is_new], group[~is_new]), 4)
            if what == "publisher":
                unseen["pair"] = round(max(unseen["pair"], _quantile(off[is_new], group[is_new])), 4)
        kept = {key: round(value, 5) for key, value in sorted(whole.effects[name].items()) if abs(value) >= 5e-4}
        quantities[name] = Quantity(kept, Width(width.overall, width.families, unseen))
    return Fitted(
        source=source,
        date=datetime.date.today().isoformat(),
        rows=len(data.cases),
        models=sorted({case.traits.model for case in data.cases}),
        gpus=sorted({case.traits.gpu for case in data.cases}),
        publishers=sorted({case.traits.publisher for case in data.cases}),
        rates={
            family: {name: float(f"{value:.6g}") for name, value in rates.items()}
            for family, rates in whole.rates().items()
        },
        pairs=sorted({pair_of(case.traits) for case in data.cases}),
        **quantities,
    )


_USUALLY_WIDER = {"gpu": 1.5, "model": 1.4, "pair": _UNSEEN_PAIR}
_NEW = {"publisher": "publisher", "gpu": "gpu", "family": "model"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the cost model to files of serving measurements.")
    parser.add_argument("files", nargs="+", type=Path, help="files of measurements, in any of the known layouts")
    parser.add_argument("--output", type=Path, default=FITTED_FILE, help="where to write the fitted numbers")
    given = parser.parse_args()
    read = [case for case in read_cases(given.files) if tells_of_today(case)]
    cases = [case for case in read if case.measurement.kind != "poisson"]
    data = load_data(cases)  # when steps fell by the clock is itself a prediction
    fitted = to_fitted(data, ", ".join(path.name for path in given.files), leave_out=("publisher", "gpu", "family"))
    write_fitted(fitted, given.output)
    for name, quantity in (("TPOT", fitted.tpot), ("TTFT", fitted.ttft)):
        print(f"{fitted.rows} rows; 90 % half-widths of {name} (logarithms): {quantity.width}")


if __name__ == "__main__":
    main()
