"""How long kernels take in a graph, one behind the other as in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch


def microseconds(runs: Sequence[Callable[[], object]]) -> float:
    """Of one of them, all in one graph."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(20):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / len(runs))
    return median(times)
