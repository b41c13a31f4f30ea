"""How true the plan is: `python benchmarks/plan_goals.py DATA`. DATA holds the files of measurements.

Rows of the fitted source (Hopper, Blackwell) by folds of whole series, Blackwell without a Blackwell row, other
publishers without a row of theirs, each publisher, GPU and family of models without its own rows, and Phalanx by its
own profile. Every row is predicted by a fit that has not seen it, with an interval from errors that have not either.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from phalanx.plan.cases import Case
from phalanx.plan.fit_data import Array, Data, load_data
from phalanx.plan.held_out import ALWAYS_SEEN, FOLDS, bounds, fold_of, group_of, predict_unseen, read_cases, widths

RESULTS = [Path(__file__).parent / "results" / f"{name}.jsonl" for name in ("h200", "h200_frontier")]
NEW_ARCHITECTURE = 1.5
"""How much wider intervals are on an architecture without serving rows: a rule of thumb, not fitted."""
NVIDIA_OVERVIEW = ("trt014", "trt10", "trt12")


FILES = ("serving_measurements.csv", "blackwell_measurements.csv", "independent_measurements.csv")


def files_of(words: Sequence[str] | None = None) -> list[Path]:
    """The files of measurements that the command names."""
    parser = argparse.ArgumentParser(
        description="How true the plan is: errors and intervals of rows that were not seen."
    )
    parser.add_argument("data", type=Path, metavar="DATA", help=f"a folder with {', '.join(FILES)}")
    folder = parser.parse_args(words).data
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        parser.error(f"{folder} has no {' and no '.join(missing)}")
    return [folder / name for name in FILES]


def main() -> None:
    data = load_data(read_cases([*files_of(), *RESULTS]))
    hopper, blackwell, independent, ours = (rows(data, test) for test in (is_hopper, is_blackwell, is_other, is_ours))
    by_series = fold_of(data.cases, FOLDS)
    say("Hopper, folds of series", *unseen(data, hopper, by_series, hopper))
    say("Blackwell, folds of series", *unseen(data, hopper | blackwell, by_series, blackwell))
    say("Blackwell, none fitted", *unfitted(data, hopper, blackwell, NEW_ARCHITECTURE))
    current = independent & rows(data, lambda case: case.measurement.tier == "current")
    say("other publishers, none fitted", *unfitted(data, hopper | blackwell, current, 1.0))
    publisher = group_of(data.cases, "publisher")
    say("each publisher unseen", *unseen(data, hopper | blackwell | independent, publisher, independent))
    merged = publisher.copy()
    merged[rows(data, lambda case: case.measurement.publisher in NVIDIA_OVERVIEW)] = publisher.max() + 1
    say("  the same, NVIDIA's three as one", *unseen(data, hopper | blackwell | independent, merged, independent))
    everyone = hopper | blackwell | independent
    for what in ("gpu", "family"):
        say(f"each {what} unseen", *unseen(data, everyone, group_of(data.cases, what), everyone))
    series = np.arange(len(data.cases)) % FOLDS
    say("Phalanx on the H200, folds of cases", *unseen(data, hopper | ours, series, ours))


def rows(data: Data, test: Callable[[Case], bool]) -> Array:
    return np.array([test(case) for case in data.cases])


def is_fitted_source(case: Case) -> bool:
    return case.measurement.length_rule != ""


def is_hopper(case: Case) -> bool:
    return is_fitted_source(case) and case.limits.gpu.architecture == "Hopper"


def is_blackwell(case: Case) -> bool:
    return is_fitted_source(case) and case.limits.gpu.architecture == "Blackwell"


def is_ours(case: Case) -> bool:
    return case.measurement.engine == "phalanx"


def is_other(case: Case) -> bool:
    """Of another publisher, but for arrivals by the clock, and rows that the file itself marks as suspect."""
    row = case.measurement
    return not is_fitted_source(case) and not is_ours(case) and row.kind != "poisson" and row.tier != "suspect"


Result = tuple[Data, dict[str, Array], dict[str, Array]]


def unseen(data: Data, used: Array, fold: Array, told: Array) -> Result:
    """Rows that are told, each by a fit of the used rows without its fold."""
    part = data.subset(np.flatnonzero(used))
    mine = np.where(told, fold, ALWAYS_SEEN)[used]
    found = predict_unseen(part, mine)
    return part, found, bounds(part, found, mine)


def unfitted(data: Data, fitted: Array, told: Array, wider: float) -> Result:
    """Rows that are told by a fit of others; intervals from leaving out a publisher of those others at a time, each of
    which counts the same.
    """
    part = data.subset(np.flatnonzero(fitted | told))
    mine = np.where(told, 0, ALWAYS_SEEN)[fitted | told]
    found = predict_unseen(part, mine)
    inner = data.subset(np.flatnonzero(fitted))
    publisher = group_of(inner.cases, "publisher")
    new = predict_unseen(inner, publisher)
    wide = {name: widths(inner.cases, new[name] - inner.measured[name], publisher).overall for name in found}
    return part, found, {name: np.full(len(part.cases), wider * half) for name, half in wide.items()}


def say(what: str, data: Data, found: dict[str, Array], half: dict[str, Array]) -> None:
    whole = np.array([case.measurement.tpot is None for case in data.cases])
    parts = []
    for title, name, chosen in (("TPOT", "tpot", ~whole), ("throughput", "tpot", whole), ("TTFT", "ttft", ~whole)):
        off = (found[name] - data.measured[name])[chosen]
        wide = half[name][chosen][np.isfinite(off)]
        off = off[np.isfinite(off)]
        if len(off):
            error = np.median(np.abs(np.expm1(off if title != "throughput" else -off)))
            held = np.mean(np.abs(off) <= wide)
            parts.append(f"{title} {error:.1%} bias {np.median(off):+.2f} holds {held:.0%} (n={len(off)})")
    print(f"{what:42s} {'; '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
