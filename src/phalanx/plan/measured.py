"""What a plan says of the calibration it was made with."""

from __future__ import annotations

from typing import Any

from phalanx.cost.calibrated import bandwidth_factor, compute_factor
from phalanx.plan.candidates import Plan
from phalanx.spec.calibration import Calibration


def calibration_lines(plan: Plan) -> list[str]:
    """Which measurement the times rest on, how far it moved them, and what it did not cover; nothing without one."""
    calibration = plan.machine.calibration
    if calibration is None:
        return []
    factors = ", ".join(f"{name} {factor:.2f}" for name, factor in _factors(calibration).items())
    ranks = _and([table.ranks for table in calibration.all_reduces])
    reduces = f"all-reduces over {ranks} ranks as measured" if ranks else "all-reduces by the cost model"
    where = f"{calibration.date[:10]} on {calibration.host}, {calibration.machine}"
    return [f"Calibrated by a measurement of {where}: {factors} of a healthy card's; {reduces}.", *_notes(plan)]


def calibration_dict(plan: Plan) -> dict[str, Any] | None:
    """The same for programs."""
    calibration = plan.machine.calibration
    if calibration is None:
        return None
    return {
        "date": calibration.date,
        "machine": calibration.machine,
        "host": calibration.host,
        "source": calibration.source,
        "factors": _factors(calibration),
        "all_reduce_ranks": [table.ranks for table in calibration.all_reduces],
        "notes": _notes(plan),
    }


def _factors(calibration: Calibration) -> dict[str, float]:
    products = {name: compute_factor(calibration, name) for name in ("bf16", "fp8")}
    return {"memory": bandwidth_factor(calibration), **products}


def _notes(plan: Plan) -> list[str]:
    calibration = plan.machine.calibration
    assert calibration is not None
    measured = [table.ranks for table in calibration.all_reduces]
    degrees = sorted({each.tp for each in plan.candidates if each.tp > 1})
    missing = [tp for tp in degrees if not measured or not measured[0] <= tp <= measured[-1]]
    notes = []
    if missing and measured:
        notes.append(f"note: All-reduces over {_and(missing)} ranks were not measured: the cost model's are used.")
    if calibration.machine != plan.machine.name:
        notes.append(f"note: {calibration.machine} was measured, {plan.machine.name} is planned.")
    return notes


def _and(numbers: list[int]) -> str:
    *most, last = [str(number) for number in numbers] or [""]
    return f"{', '.join(most)} and {last}" if most else last
