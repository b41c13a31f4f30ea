"""How a replica scales with its ranks at the same batch, and what bounds each point."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.engine.step_sums import StepSums
from phalanx.errors import ConfigError
from phalanx.plan.candidates import Candidate, Plan
from phalanx.plan.predict import predictor

BOUNDS = {
    "weights": "weights",
    "experts": "experts",
    "attention": "KV cache",
    "all_reduce": "all-reduces",
    "overhead": "launches and host",
}
"""What a step's time goes to, in words."""


@dataclass(frozen=True)
class ScalingPoint:
    """One TP degree: tokens a second of a replica with `batch` requests, against the fewest ranks' times the ranks.
    `shares`: of the step's time, by what it goes to; `bound` takes the most of it.
    """

    tp: int
    batch: int
    tokens_per_s: float
    ideal_tokens_per_s: float
    efficiency: float
    bound: str
    shares: dict[str, float]


def scaling_curve(plan: Plan) -> list[ScalingPoint]:
    """The winner's engine and format at every TP degree that fits, each replica decoding the winner's batch."""
    best = plan.best
    if best is None:
        return []
    batch = max(1, min(best.sequences, best.workload.concurrency))
    context = plan.workload.mean_input + plan.workload.mean_output / 2
    step = StepSums(batch, batch * context)
    points: list[ScalingPoint] = []
    for each in plan.side_by_side:
        seconds, shares = _step(plan, each, step)
        first = points[0] if points else None
        speed = batch / seconds
        ideal = first.tokens_per_s * each.tp / first.tp if first else speed
        bound = max(shares, key=lambda name: shares[name])
        points.append(ScalingPoint(each.tp, batch, speed, ideal, speed / ideal, bound, shares))
    return points


def _step(plan: Plan, each: Candidate, step: StepSums) -> tuple[float, dict[str, float]]:
    priced = predictor(
        plan.spec, each.group, each.tp, each.engine.name, each.workload, each.weight_format, each.fit.kv_format
    )
    cost = priced.cost(step)
    shares = {BOUNDS[name]: getattr(cost, name) / cost.total for name in cost._fields}
    return priced.seconds(step).mid, shares


def draw_scaling(plan: Plan, path: Path) -> None:
    """A PNG: tokens a second by TP degree beside what the ranks would give at best, and where each step's time goes."""
    points = scaling_curve(plan)
    if not points:
        raise ConfigError("nothing_to_draw", f"{plan.model} does not fit {plan.machine.name}.", "Use a larger machine.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    curve, parts = figure.subplots(1, 2)
    _draw_curve(curve, points)
    _draw_parts(parts, points)
    assert plan.best is not None
    figure.suptitle(f"{plan.model} on {plan.machine.name}: {plan.best.engine.title} {plan.best.weight_format}")
    figure.savefig(path, dpi=150)


def _draw_curve(axes: Any, points: list[ScalingPoint]) -> None:
    degrees = [point.tp for point in points]
    axes.plot(
        degrees, [point.ideal_tokens_per_s for point in points], ":", color="grey", label="each rank adds as much"
    )
    axes.plot(degrees, [point.tokens_per_s for point in points], "o-", label="predicted")
    for point in points:
        words = f"{point.efficiency:.0%}, {point.bound}"
        axes.annotate(words, (point.tp, point.tokens_per_s), (4, -12), textcoords="offset points", fontsize=8)
    title = f"decoding, {points[0].batch} requests a replica"
    axes.set(xlabel="TP", ylabel="output tokens a second of a replica", title=title, xticks=degrees, ylim=(0, None))
    axes.legend()


def _draw_parts(axes: Any, points: list[ScalingPoint]) -> None:
    places, ground = range(len(points)), [0.0] * len(points)
    for name in BOUNDS.values():
        heights = [100 * point.shares[name] for point in points]
        axes.bar(places, heights, bottom=ground, label=name)
        ground = [under + height for under, height in zip(ground, heights, strict=True)]
    labels = [f"TP={point.tp}" for point in points]
    axes.set(xticks=list(places), xticklabels=labels, ylabel="percent of a step", title="where a step's time goes")
    axes.legend()
