"""Latencies of a run in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from phalanx.bench.serving.measure import RequestTrace, gaps


def save_plot(traces: Sequence[RequestTrace], title: str, path: Path) -> None:
    """The share of requests (TTFT, TPOT) and of gaps between chunks (ITL) that took at most so long."""
    done = [trace for trace in traces if trace.error is None]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    tpots = np.array([trace.tpot for trace in done if trace.tpot is not None])
    for axes, name, seconds in (
        (left, "TTFT", np.array([trace.ttft for trace in done])),
        (right, "TPOT", tpots),
        (right, "ITL", gaps(done)),
    ):
        if seconds.size:
            axes.ecdf(seconds * 1e3, label=name)
    for axes in (left, right):
        axes.set_xlabel("ms")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="lower right")
    left.set_ylabel("share")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
