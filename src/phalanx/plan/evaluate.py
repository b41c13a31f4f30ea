"""Predicted against measured: how far off, and how often inside the interval, by engine, GPU, model and TP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from phalanx.cost.fitted import load_fitted
from phalanx.errors import PhalanxError
from phalanx.plan.cases import Case, prepare
from phalanx.plan.measurements import BadRow, Measurement, MeasurementError, read_measurements
from phalanx.plan.predict import Interval, Predictor

QUANTITIES = ("tpot", "ttft", "throughput")


class EvaluationError(PhalanxError):
    """The evaluation cannot be made or drawn."""


@dataclass(frozen=True)
class Row:
    """A measurement and what was predicted for it, or why nothing was."""

    measurement: Measurement
    tpot: Interval | None = None
    ttft: Interval | None = None
    throughput: Interval | None = None
    problem: str = ""


@dataclass(frozen=True)
class Score:
    """How good predictions of one quantity are; errors are fractions of what was measured."""

    median_ape: float
    mean_ape: float
    bias: float
    within_10: float
    within_20: float
    coverage_90: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[Interval, float]]) -> Score:
        """Bias is the median signed error: above zero, predictions are too high."""
        errors = [predicted.mid / measured - 1 for predicted, measured in pairs]
        sizes = [abs(error) for error in errors]
        return cls(
            median_ape=median(sizes),
            mean_ape=fmean(sizes),
            bias=median(errors),
            within_10=fmean(size <= 0.1 for size in sizes),
            within_20=fmean(size <= 0.2 for size in sizes),
            coverage_90=fmean(predicted.low <= measured <= predicted.high for predicted, measured in pairs),
        )

    def to_dict(self) -> dict[str, float]:
        return vars(self).copy()


@dataclass(frozen=True)
class Evaluation:
    """Every row of a file with its prediction, and the lines that hold no measurement."""

    rows: tuple[Row, ...]
    bad: tuple[BadRow, ...] = ()

    @property
    def unpredicted(self) -> list[Row]:
        return [row for row in self.rows if row.problem]

    def groups(self) -> dict[tuple[str, str, str, int], list[Row]]:
        """Rows by engine, GPU, model and TP."""
        found: dict[tuple[str, str, str, int], list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: row.measurement.series):
            found.setdefault(row.measurement.series, []).append(row)
        return found

    def to_dict(self) -> dict[str, Any]:
        names = ("engine", "gpu", "model", "tp")
        return {
            "overall": _summary(self.rows),
            "bad_rows": [vars(row) for row in self.bad],
            "unpredicted": [{"line": row.measurement.line, "problem": row.problem} for row in self.unpredicted],
            "groups": [
                {**dict(zip(names, series, strict=True)), **_summary(rows)} for series, rows in self.groups().items()
            ],
        }

    def table(self) -> Table:
        """One line a group, the whole file last."""
        table = Table(
            title="Predicted against measured: median and mean error, bias, within 10 / 20 %, in the interval"
        )
        for heading in ("engine", "GPU", "model", "TP", "rows", "TPOT", "TTFT", "tok/s"):
            table.add_column(heading, justify="left" if heading in ("engine", "GPU", "model") else "right")
        for (engine, gpu, model, tp), rows in self.groups().items():
            table.add_row(engine, gpu, model.rpartition("/")[2], str(tp), *_cells(rows))
        table.add_section()
        table.add_row("all", "", "", "", *_cells(self.rows))
        return table


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    scores = {name: _score(rows, name) for name in QUANTITIES}
    return {
        "rows": len(rows),
        "predicted": sum(not row.problem for row in rows),
        **{name: score.to_dict() if score else None for name, score in scores.items()},
    }


def _score(rows: Iterable[Row], quantity: str) -> Score | None:
    pairs = [(getattr(row, quantity), getattr(row.measurement, quantity)) for row in rows if not row.problem]
    known = [(predicted, measured) for predicted, measured in pairs if predicted and measured]
    return Score.of(known) if known else None


def _cells(rows: Sequence[Row]) -> list[str]:
    predicted = sum(not row.problem for row in rows)
    cells = [str(len(rows)) if predicted == len(rows) else f"{predicted} of {len(rows)}"]
    for name in QUANTITIES:
        score = _score(rows, name)
        cells.append("-" if score is None else _cell(score))
    return cells


def _cell(score: Score) -> str:
    shares = f"{score.within_10:.0%} / {score.within_20:.0%}, {score.coverage_90:.0%}"
    return f"{score.median_ape:.1%} {score.mean_ape:.1%} {score.bias:+.1%} {shares}"


def evaluate(
    path: Path, folds: int | None = None, leave_out: str | None = None, beside: Sequence[Path] = ()
) -> Evaluation:
    """Predict every row of a file: with the fitted numbers that Phalanx carries; with `folds`, by calibrations that
    have not seen the row's series; with `leave_out`, by ones that have not seen its publisher, GPU or family.
    Those fit the file's own rows and those `beside` it.
    """
    reading = read_measurements(path)
    if not reading.measurements and not reading.bad:
        raise MeasurementError("no_rows", f"{path.name} has no rows.", "Give a file with measurements.")
    prepared = [_prepare(measurement) for measurement in reading.measurements]
    held_out = folds is not None or leave_out is not None
    if held_out:
        prepared = [_unless_drafted(case) for case in prepared]
    cases = [case for case in prepared if isinstance(case, Case)]
    predicted = iter(_held_out(cases, folds, leave_out, beside) if held_out else map(_predict, cases))
    return Evaluation(tuple(row if isinstance(row, Row) else next(predicted) for row in prepared), reading.bad)


def _prepare(measurement: Measurement) -> Case | Row:
    try:
        return prepare(measurement)
    except PhalanxError as error:
        return Row(measurement, problem=f"{measurement}: {error.found}")


def _unless_drafted(case: Case | Row) -> Case | Row:
    if isinstance(case, Case) and case.measurement.speculates:
        return Row(case.measurement, problem="Rows with drafts are never fitted: evaluate them as they are.")
    return case


def _predict(case: Case) -> Row:
    together = case.measurement.attention_ranks * case.measurement.stages
    predictor = Predictor(case.limits, case.traits, load_fitted(), case.drafting, together)
    if case.measurement.kind == "burst":
        return predict_burst(case, predictor)
    prediction = predictor.predict(*case.trace_key)
    throughput = prediction.throughput.times(case.measurement.batches)
    return Row(case.measurement, prediction.tpot, prediction.ttft, throughput)


def predict_burst(case: Case, predictor: Predictor) -> Row:
    """As the benchmark has it: a run with one token each is the prompts, a longer one has steps in which all decode."""
    steps, whole = predictor.run_seconds(*case.first_key), predictor.run_seconds(*case.trace_key)
    between = predictor.decoding_together(*case.trace_key)
    first = predictor.first_run(steps.mid, case.workload.input_tokens)
    tokens, corrected = case.workload.concurrency * case.workload.output_tokens, first.mid - steps.mid
    throughput = Interval(*(tokens / (seconds + corrected) for seconds in (whole.mid, whole.high, whole.low)))
    return Row(case.measurement, between, first, throughput)


def _held_out(cases: list[Case], folds: int | None, leave_out: str | None, beside: Sequence[Path]) -> list[Row]:
    if folds is not None and folds < 2:
        raise EvaluationError("bad_folds", f"Cross-validation in {folds} folds.", "Use at least 2.")
    try:
        from phalanx.plan import held_out
    except ModuleNotFoundError as error:
        raise EvaluationError("no_numpy", "Cross-validation needs numpy.", "pip install numpy") from error
    if leave_out is not None and leave_out not in held_out.GROUPS:
        known = ", ".join(held_out.GROUPS)
        raise EvaluationError("bad_group", f"No whole {leave_out!r} can be left out.", f"Known: {known}.")
    told = held_out.predict_cases(cases, folds, leave_out, held_out.read_cases(beside))
    return [_row(case, _interval(*tpot), _interval(*ttft)) for case, tpot, ttft in told]


def _row(case: Case, tpot: Interval, ttft: Interval) -> Row:
    """Of a run that was measured as a whole, TPOT is its seconds over its output tokens."""
    row, load = case.measurement, case.workload
    if row.tpot is None:
        return Row(row, throughput=Interval(*(row.batches / seconds for seconds in (tpot.mid, tpot.high, tpot.low))))
    seconds = ttft.mid + (load.mean_output - 1) * tpot.mid
    throughput = Interval.around(row.batches * load.concurrency * load.mean_output / seconds, log(tpot.high / tpot.mid))
    return Row(row, tpot, ttft, throughput)


def _interval(logarithm: float, half_width: float) -> Interval:
    return Interval.around(exp(logarithm), half_width)


def draw(report: Evaluation, path: Path) -> None:
    """A PNG of predicted against measured, one point a row, with the lines of 20 % error."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise EvaluationError("no_matplotlib", "Drawing needs matplotlib.", "pip install matplotlib") from error
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    for axes, quantity in zip(figure.subplots(1, 2), ("tpot", "ttft"), strict=True):
        _draw_quantity(axes, report, quantity)
    figure.savefig(path, dpi=150)


def _draw_quantity(axes: Any, report: Evaluation, quantity: str) -> None:
    rows = [row for row in report.rows if getattr(row, quantity) and getattr(row.measurement, quantity)]
    for engine in sorted({row.measurement.engine for row in rows}):
        mine = [row for row in rows if row.measurement.engine == engine]
        measured = [getattr(row.measurement, quantity) * 1e3 for row in mine]
        axes.scatter(measured, [getattr(row, quantity).mid * 1e3 for row in mine], s=9, alpha=0.6, label=engine)
    values = [getattr(row.measurement, quantity) * 1e3 for row in rows]
    ends = [min(values), max(values)]
    for factor, style in ((1.0, "-"), (1.2, ":"), (1 / 1.2, ":")):
        axes.plot(ends, [end * factor for end in ends], style, color="grey", linewidth=0.9)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms", title=quantity.upper())
    axes.legend()
