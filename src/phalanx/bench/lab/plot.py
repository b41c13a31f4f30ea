"""The scaling curve as a picture, with the bottleneck at every point."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from phalanx.bench.lab.experiment import Lab
from phalanx.bench.lab.report import heading


def save_plot(lab: Lab, path: Path) -> None:
    """Tokens a second of a replica by TP, beside as many replicas of the smallest one, and as planned."""
    points, base = lab.points, lab.points[0]
    degrees = [point.tp for point in points]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    ideal = [base.tok_s_per_gpu * tp for tp in degrees]
    axes.plot(degrees, ideal, "--", color="0.6", label=f"replicas of TP={base.tp} on as many GPUs")
    axes.plot(degrees, [point.tok_s for point in points], "o-", color="tab:blue", label="measured")
    planned = [(p.tp, p.tok_s * p.tpot_ms / p.planned_tpot_ms) for p in points if p.planned_tpot_ms]
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
