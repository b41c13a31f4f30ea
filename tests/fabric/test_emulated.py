"""One rank without its fellows: its own share, and the time the others would take."""

from __future__ import annotations

import time

import pytest
import torch

from phalanx.fabric.emulated import EmulatedGroup

CPU = torch.device("cpu")


def test_a_collective_takes_as_long_as_it_is_said_to() -> None:
    sizes: list[int] = []
    group = EmulatedGroup(4, lambda size: sizes.append(size) or 0.01, CPU)  # type: ignore[func-returns-value]
    x = torch.randn(3, 8)
    began = time.perf_counter()
    assert torch.equal(group.all_reduce(x.clone()), x)
    assert time.perf_counter() - began >= 0.01
    assert sizes == [3 * 8 * 4]
    assert (group.seconds, group.calls) == (0.01, 1)


def test_the_best_token_is_one_of_its_own() -> None:
    group = EmulatedGroup(3, lambda size: 0.0, CPU)
    own = torch.randn(5, 7) - 100
    whole = group.all_gather_columns(own, [7, 6, 6])
    assert whole.shape == (5, 19)
    assert torch.equal(whole.argmax(1), own.argmax(1))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_delay_runs_inside_a_graph() -> None:
    device = torch.device("cuda")
    group, x = EmulatedGroup(2, lambda size: 200e-6, device), torch.randn(4, 4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            group.all_reduce(x)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    assert 1.6 < begin.elapsed_time(end) < 3.0
