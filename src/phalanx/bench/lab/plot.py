"""The scaling curve as a picture, with the bottleneck at every point."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from phalanx.bench.lab.experiment import Lab
from phalanx.bench.lab.point import LabPoint
from phalanx.bench.lab.report import heading
from phalanx.bench.timing import FixedBatch


def save_plot(lab: Lab, path: Path) -> None:
    draw(lab).savefig(path, dpi=150)


def draw(lab: Lab) -> Figure:
    """Tokens a second of a replica by TP, beside what was expected: as planned, or as the machine's limits allow. On
    GPUs also as many replicas of the smallest one; on CPUs they would share the cores.
    """
    points, base = lab.points, lab.points[0]
    degrees = [point.tp for point in points]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    if lab.on_gpus:
        ideal = [base.tok_s_per_gpu * tp for tp in degrees]
        axes.plot(degrees, ideal, "--", color="0.6", label=f"replicas of TP={base.tp}, each on its own")
    axes.plot(degrees, [point.tok_s for point in points], "o-", color="tab:blue", label="measured")
    expected = "planned" if base.planned_tpot_ms else "the most that memory and products allow"
    axes.plot(degrees, [_expected_tok_s(lab, p) for p in points], "x:", color="tab:orange", label=expected)
    for point in points:
        of_base = f"{point.tok_s / base.tok_s:.0%} of TP={base.tp}"
        text = f"{point.bottleneck}\n{f'{point.efficiency:.0%} efficient' if lab.on_gpus else of_base}"
        axes.annotate(text, (point.tp, point.tok_s), (0, -24), textcoords="offset points", fontsize=8, ha="center")
    axes.set_xticks(degrees)
    axes.set_xlabel("TP")
    axes.set_ylabel("tokens/s a replica")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.18)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    axes.set_title(heading(lab), fontsize=10)
    return figure


def _expected_tok_s(lab: Lab, point: LabPoint) -> float:
    """Of the whole run, prompts included."""
    case = FixedBatch.parse(lab.case)
    first = point.planned_ttft_ms or point.least_ttft_ms
    between = point.planned_tpot_ms or point.least_tpot_ms
    return 1e3 * case.batch * case.outputs / (first + (case.outputs - 1) * between)
