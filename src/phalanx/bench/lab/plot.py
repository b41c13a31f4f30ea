"""The scaling curve as a picture, with the bottleneck at every point."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from phalanx.bench.lab.experiment import Lab
from phalanx.bench.lab.point import LabPoint
from phalanx.bench.lab.report import heading
from phalanx.bench.timing import FixedBatch


def save_plot(lab: Lab, path: Path) -> None:
    """Tokens a second of a replica by TP, beside as many replicas of the smallest one, and as planned."""
    points, base = lab.points, lab.points[0]
    degrees = [point.tp for point in points]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    ideal = [base.tok_s_per_gpu * tp for tp in degrees]
    axes.plot(degrees, ideal, "--", color="0.6", label=f"replicas of TP={base.tp}, each on its own")
    axes.plot(degrees, [point.tok_s for point in points], "o-", color="tab:blue", label="measured")
    planned = [(p.tp, _planned_tok_s(lab, p)) for p in points if p.planned_tpot_ms]
    if planned:
        axes.plot(*zip(*planned, strict=True), "x:", color="tab:orange", label="planned")
    for point in points:
        text = f"{point.bottleneck}\n{point.efficiency:.0%} efficient"
        axes.annotate(text, (point.tp, point.tok_s), (0, -24), textcoords="offset points", fontsize=8, ha="center")
    axes.set_xticks(degrees)
    axes.set_xlabel("TP")
    axes.set_ylabel("tokens/s a replica")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.18)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    axes.set_title(heading(lab), fontsize=10)
    figure.savefig(path, dpi=150)


def _planned_tok_s(lab: Lab, point: LabPoint) -> float:
    """Of the whole run, prompts included."""
    assert point.planned_ttft_ms is not None
    assert point.planned_tpot_ms is not None
    case = FixedBatch.parse(lab.case)
    return 1e3 * case.batch * case.outputs / (point.planned_ttft_ms + (case.outputs - 1) * point.planned_tpot_ms)
