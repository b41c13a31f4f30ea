"""Calibration: fits the numbers of `cost/fitted.json` to files of serving measurements. Needs numpy.

    python -m phalanx.plan.held_out serving_measurements.csv ...

First the rates of every engine family, then corrections of what is left. Both are shrunk: rates of a family towards
those of its engine and these towards what all engines share, corrections towards none. Rows far off count less (Cauchy
weights), since some measurements are wrong. Intervals come from predictions of rows that the fit has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.cases import Case
from phalanx.plan.fit_data import QUANTITIES, Array, Data, Start
from phalanx.plan.ridge import Sparse, solve_ridge

# How stiffly rates hold to their starts, those of an engine to what all share, those of its versions to the engine's,
# and those of an architecture to none, or entirely (`_HELD`) where they are the host's. Of 1, 2 and 4 for versions, 4
# was best on unseen series of Hopper and Blackwell.
_SHARED_STIFFNESS = 0.3
_ENGINE_STIFFNESS = 1.0
_FAMILY_STIFFNESS = 4.0
_HARDWARE_STIFFNESS = 1.5
_HELD = 1e4
_NOISE = {"tpot": 0.08, "ttft": 0.27}
"""What a logarithm is off by when the rates are right."""
_OUTLIER = {"tpot": 0.12, "ttft": 0.3}
"""Beyond this far off, a row counts less."""
_EFFECT_SPREAD = {
    "tpot": {"family": 0.05, "kind": 0.05, "model": 0.1, "version": 0.1, "gpu": 0.05, "series": 0.06}
    | {"card": 0.1, "regime": 0.15, "publisher": 0.1, "apart": 0.3},
    "ttft": {"family": 0.1, "kind": 0.15, "model": 0.3, "version": 0.2, "gpu": 0.1, "series": 0.1}
    | {"card": 0.15, "regime": 0.2, "publisher": 0.3, "apart": 0.3},
}
_SLOPE_SPREAD = {
    "tpot": {"slope": 0.05, "model_slope": 0.06},
    "ttft": {"slope": 0.18, "model_slope": 0.18},
}


@dataclass
class FittedRates:
    """Rates as shifts of their starts (shared, one row a family, one an architecture) and effects by quantity."""

    starts: dict[str, Start]
    families: list[str]
    architectures: list[str]
    shared: Array
    apart: Array
    hardware: Array
    effects: dict[str, dict[str, float]]

    def shifts(self, data: Data) -> Array:
        return self.shared + self.apart[data.family] + self.hardware[data.architecture]

    def predict(self, data: Data) -> dict[str, Array]:
        """Logarithms of corrected TPOT and TTFT."""
        found = data.predict(self.shifts(data))
        return {name: values + self._corrections(name, data) for name, values in found.items()}

    def _corrections(self, quantity: str, data: Data) -> Array:
        known = self.effects[quantity]
        return np.array(
            [
                sum(strength * known.get(f"{kind}:{name}", 0.0) for kind, name, strength in applied)
                for applied in data.effects
            ]
        )

    def rates(self) -> dict[str, dict[str, float]]:
        """By `family@architecture`, and by family alone for architectures that nothing was measured on."""
        found = {}
        for number, family in enumerate(self.families):
            found[family] = self._named(self.shared + self.apart[number])
            for place, architecture in enumerate(self.architectures):
                shift = self.shared + self.apart[number] + self.hardware[place]
                found[f"{family}@{architecture}"] = self._named(shift)
        return found

    def _named(self, shift: Array) -> dict[str, float]:
        return {name: float(start.at(shift[index])) for index, (name, start) in enumerate(self.starts.items())}


_WITHOUT_ROCM_KERNELS = ("vllm-0.5", "vllm-0.7")


def tells_of_today(case: Case) -> bool:
    """Not vLLM on AMD before it had kernels made for it: its attention read keys anew for every query head
    (vllm-project/vllm#15351).
    """
    return not (case.limits.gpu.vendor == "AMD" and case.traits.family in _WITHOUT_ROCM_KERNELS)


def calibrate(data: Data) -> FittedRates:
    """Fit rates, then effects on what they leave, to the rows that tell of either, where there are any."""
    telling = np.flatnonzero([tells_of_today(case) for case in data.cases])
    data = data.subset(telling) if len(telling) else data
    found = FittedRates(data.starts, data.families, data.architectures, *_fit_rates(data), {})
    left = data.predict(found.shifts(data))
    for name in QUANTITIES:
        found.effects[name] = _fit_effects(name, data, data.measured[name] - left[name])
    return found


def _fit_rates(data: Data, most_rounds: int = 25) -> tuple[Array, Array, Array]:
    """Damped Gauss-Newton. What is an engine's, a family's or an architecture's own moves its rows as what is shared
    does: one Jacobian serves all.
    """
    groups = _groups(data)
    spreads = np.array([start.spread for start in data.starts.values()])
    held = np.array([_HELD if start.on_any_card else 1.0 for start in data.starts.values()])
    by_group = [each.stiffness / spreads * (held if each.is_hardware else 1.0) for each in groups]
    stiffness = np.concatenate([np.tile(stiff, each.many) for stiff, each in zip(by_group, groups, strict=True)])
    at, damping = np.zeros(len(stiffness)), 1.0
    known = np.concatenate([data.tells_rates & np.isfinite(data.measured[name]) for name in QUANTITIES])

    def parts(point: Array) -> list[Array]:
        ends = np.cumsum([each.many for each in groups])[:-1]
        return list(np.split(point.reshape(-1, len(spreads)), ends))

    def shifts(point: Array) -> Array:
        return sum(part[each.of_row] for part, each in zip(parts(point), groups, strict=True))

    def residuals(point: Array) -> Array:
        found = data.predict(shifts(point))
        off = np.concatenate([(found[name] - data.measured[name]) / _NOISE[name] for name in QUANTITIES])
        return np.where(known, off, 0.0)

    scale = np.repeat([_OUTLIER[name] / _NOISE[name] for name in QUANTITIES], len(data.cases))
    off = residuals(at)
    for _ in range(most_rounds):
        weight = 1 / (1 + (off / scale) ** 2)
        loss = weight @ off**2 + np.sum((at * stiffness) ** 2)
        jacobian = _jacobian(data, shifts(at), groups) * known[:, None]
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
        if loss - improved < 1e-3 * loss:
            break
    shared, engines, families, architectures = parts(at)
    return shared[0], families + engines[data.engine_of_family], architectures


@dataclass(frozen=True)
class _Group:
    """Rows that share shifts of their own: which of `many` each row has, and how stiffly these hold to none."""

    of_row: Array
    many: int
    stiffness: float
    is_hardware: bool = False


def _groups(data: Data) -> tuple[_Group, ...]:
    engine = data.engine_of_family
    return (
        _Group(np.zeros(len(data.cases), dtype=int), 1, _SHARED_STIFFNESS),
        _Group(engine[data.family], int(engine.max()) + 1, _ENGINE_STIFFNESS),
        _Group(data.family, len(data.families), _FAMILY_STIFFNESS),
        _Group(data.architecture, len(data.architectures), _HARDWARE_STIFFNESS, is_hardware=True),
    )


def _jacobian(data: Data, shifts: Array, groups: tuple[_Group, ...]) -> Array:
    slopes = data.slopes(shifts)
    shared = np.concatenate([slopes[name] / _NOISE[name] for name in QUANTITIES])
    return np.hstack(
        [shared * (np.tile(each.of_row, 2) == number)[:, None] for each in groups for number in range(each.many)]
    )


def _fit_effects(quantity: str, data: Data, left: Array, rounds: int = 4) -> dict[str, float]:
    """Ridge regression of what is left, each kind of effect with its own spread."""
    spreads = {**_EFFECT_SPREAD[quantity], **_SLOPE_SPREAD[quantity]}
    names: dict[str, int] = {}
    stiff: list[float] = []
    entries = []
    for row in range(len(data.cases)):
        for kind, name, strength in data.effects[row]:
            column = names.setdefault(f"{kind}:{name}", len(names))
            if column == len(stiff):
                stiff.append(1 / spreads[kind] ** 2)
            entries.append((row, column, strength))
    rows, columns, strengths = (np.array(part) for part in zip(*entries, strict=True))
    design = Sparse(rows, columns, strengths, len(data.cases), len(names))
    noise, outlier = _NOISE[quantity], _OUTLIER[quantity]
    known = np.isfinite(left)
    left = np.where(known, left, 0.0)
    found = np.zeros(len(names))
    for _ in range(rounds):
        weight = known / (1 + ((left - design.times(found)) / outlier) ** 2) / noise**2
        found = solve_ridge(design, weight, np.array(stiff), left, found)
    return {name: float(found[column]) for name, column in names.items()}
