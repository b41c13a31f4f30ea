"""Phalanx's own numbers on one machine: fitted to its measured steps, starting from those that it comes with."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.table import Table

from phalanx.cost.fitted import Fitted, Quantity, load_fitted, pair_of
from phalanx.plan.calibrate import calibrate
from phalanx.plan.cases import prepare
from phalanx.plan.evaluate import predict_burst
from phalanx.plan.fit_data import QUANTITIES, STARTS, Start, load_data
from phalanx.plan.held_out import FOLDS, predict_unseen, widths
from phalanx.plan.measurements import Measurement
from phalanx.plan.predict import Interval, Predictor

_FAMILY = "phalanx"
_SURER = 0.5
"""How much nearer to the numbers it starts from a rate is held than one that nothing is known of."""
_PLANNED = ("", _FAMILY)
"""Who will have measured what is planned with these numbers: nobody else's are asked for."""


def fit_profile(measurements: Sequence[Measurement]) -> Fitted:
    """All of one GPU. Intervals come from fits without a fifth of the cases each."""
    cases = [prepare(measurement) for measurement in measurements]
    gpu = cases[0].limits.gpu
    data = load_data(cases, _starts(gpu.architecture))
    whole = calibrate(data)
    fold = np.arange(len(cases)) % FOLDS
    found = predict_unseen(data, fold)
    quantities = {
        name: Quantity(whole.effects[name], widths(cases, found[name] - data.measured[name], fold))
        for name in QUANTITIES
    }
    return Fitted(
        source=f"phalanx calibrate on {gpu.name}: {', '.join(sorted({each.model for each in measurements}))}",
        date=datetime.date.today().isoformat(),
        rows=len(cases),
        models=sorted({case.traits.model for case in cases}),
        gpus=[gpu.name],
        publishers=list(_PLANNED),
        rates=whole.rates(),
        pairs=sorted({pair_of(case.traits) for case in cases}),
        **quantities,
    )


def _starts(architecture: str) -> dict[str, Start]:
    known = load_fitted().family_rates(_FAMILY, architecture)._asdict()
    return {
        name: replace(start, value=known[name], spread=_SURER * start.spread, most=None)
        for name, start in STARTS.items()
    }


def profile_table(measurements: Sequence[Measurement], fitted: Fitted) -> Table:
    """Every case as it was measured, as the product would have said, and as the profile says."""
    table = Table(title=f"{measurements[0].gpu}, TP={measurements[0].tp}: {len(measurements)} cases", pad_edge=False)
    table.add_column("model, case")
    for title in ("TPOT ms", "before", "now", "TTFT ms", "before", "now"):
        table.add_column(title, justify="right")
    for measurement in measurements:
        case = prepare(measurement)
        before, now = (
            predict_burst(case, Predictor(case.limits, case.traits, known)) for known in (load_fitted(), fitted)
        )
        seconds = measurement.tpot, before.tpot, now.tpot, measurement.ttft, before.ttft, now.ttft
        name = f"{Path(measurement.model).name} {case.workload.concurrency}x{measurement.input_tokens}"
        table.add_row(name, *(_milliseconds(each) for each in seconds))
    return table


def _milliseconds(seconds: float | Interval | None) -> str:
    value = seconds.mid if isinstance(seconds, Interval) else seconds
    return "-" if value is None else f"{1e3 * value:.2f}"
