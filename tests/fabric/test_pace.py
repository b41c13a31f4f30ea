"""What ranks measure of the links between them: the right figures, in a bounded time, and all leave off together."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from phalanx.fabric import pace
from phalanx.fabric.group import Group
from phalanx.fabric.pace import measure_pace
from tests.threaded_ranks import Meeting, ThreadGroup

CPU = torch.device("cpu")


class Line(Group):
    """Two ranks that are always equally far, and a link of so many bytes a second, in virtual time. Of its calls all
    but every third are held up.
    """

    rank, size, in_graphs = 0, 2, False

    def __init__(self, latency: float, bandwidth: float, held_up: float = 0.0) -> None:
        self.now, self._numbers = 0.0, count()
        self._latency, self._bandwidth, self._held_up = latency, bandwidth, held_up

    def perf_counter(self) -> float:
        return self.now

    def all_reduce(self, tensor: Tensor) -> Tensor:
        held_up = self._held_up if next(self._numbers) % 3 else 0.0
        self.now += self._latency + tensor.nbytes / self._bandwidth + held_up
        return tensor * 2


def measured(line: Line, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float] | None:
    monkeypatch.setattr(pace, "time", line)
    found = measure_pace(line, CPU, "192.0.2.1")
    assert found is None or found.card == 0, "nobody here has this address"
    return (found.latency, found.bandwidth) if found else None


@pytest.mark.parametrize("bandwidth", [1e6, 25e6, 125e6, 1e9])
def test_what_it_finds_is_what_the_link_does_also_where_most_calls_are_held_up(
    bandwidth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for held_up in (0.0, 4e-3):
        line = Line(3e-4, bandwidth, held_up)
        found = measured(line, monkeypatch)
        assert found is not None
        assert found == pytest.approx((3e-4 + 256 / bandwidth, bandwidth), rel=0.05)
        assert line.now < 0.25


def test_of_a_link_that_takes_too_long_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(0.2, 1e5)
    assert measured(line, monkeypatch) is None
    assert line.now < 1


def test_the_card_of_an_address_tells_its_speed() -> None:
    assert pace._card_rate("127.0.0.1") == 0
    assert pace._card_rate("192.0.2.1") == 0


def test_all_ranks_leave_off_after_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each has a clock of its own pace."""
    meeting, here = Meeting(3), threading.local()
    groups = [ThreadGroup(meeting, rank) for rank in range(3)]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() * (1 + here.rank))
    monkeypatch.setattr(pace, "time", clock)

    def calls(rank: int) -> int:
        here.rank = rank
        with meeting.turn:
            measure_pace(groups[rank], CPU, "127.0.0.1")
        return next(groups[rank]._numbers)

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(calls, range(3))
    assert others == [first, first]
