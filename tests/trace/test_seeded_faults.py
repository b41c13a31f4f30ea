"""Faults seeded into a real engine of eight ranks through their clocks: tracer, timeline and rules together find just
the right one. The ranks are threads, and time is what the test says it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.cost.profiles import profile
from phalanx.doctor.finding import Finding
from phalanx.doctor.live import findings_of, picture_of
from phalanx.engine import tracing
from phalanx.engine.marks import RankTrace, StepTraces
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import StepPlan
from phalanx.engine.tracing import EngineTracer
from phalanx.runtime import moments, tracer
from phalanx.spec.machine import Gpu, Machine
from tests.threaded_ranks import Meeting, ThreadedEngine, ThreadedRunner

pytestmark = pytest.mark.slow

RANKS, STEPS, US = 8, 6, 1000
H100 = Gpu.named("H100-SXM")
LINK = Machine((H100,) * RANKS).link(RANKS)


class VirtualTime:
    """A clock for each rank and one for the host. A part of a layer takes a rank `work` us, a collective `link` times
    what the cost model has once all are there, and the host `pause` us before every step.
    """

    def __init__(self) -> None:
        self.host = 10**12
        self.ranks = [self.host] * RANKS
        self.work, self.link, self.pause = [70.0] * RANKS, 1.0, 2.0
        self._of = threading.local()

    def monotonic_ns(self) -> int:
        rank = getattr(self._of, "rank", None)
        return self.host if rank is None else self.ranks[rank]

    def exchange(self, size: int) -> int:
        return int(self.link * all_reduce_seconds(size, RANKS, LINK, profile("phalanx").all_reduce) * 1e9)

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """This thread is the rank's, which begins when the host tells it to."""
        self._of.rank, self.ranks[rank] = rank, self.host
        try:
            yield
        finally:
            self._of.rank = None


class Working:
    """A mixer or an FFN that takes a while."""

    def __init__(self, part: Any, take: Callable[[], None]) -> None:
        self._part, self._take = part, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *given: Any) -> Any:
        self._take()
        return self._part(*given)


@pytest.fixture(scope="module")
def engine(references: Any) -> Iterator[ThreadedEngine]:
    made = ThreadedEngine(references("llama3_rope").folder, RANKS, max_model_len=64)
    yield made
    made.close()


@pytest.fixture
def virtual(engine: ThreadedEngine, monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    time = VirtualTime()

    meet = Meeting.exchange

    def exchange(self: Meeting, rank: int, number: int, tensor: Tensor) -> list[Tensor]:
        there = max(map(int, meet(self, rank, 2 * number, torch.tensor(time.ranks[rank]))))
        found = meet(self, rank, 2 * number + 1, tensor)
        time.ranks[rank] = there + time.exchange(tensor.nbytes)
        return found

    def launch(self: ThreadedRunner, plan: StepPlan) -> None:
        def run(rank: Any) -> Any:
            with time.on(self.ranks.index(rank)):
                rank.launch(plan)
                return rank.collect()

        self._results.append(self._on_all(run)[0])
        time.host = max(time.ranks)

    def work(rank: int) -> None:
        time.ranks[rank] += int(time.work[rank] * US)

    monkeypatch.setattr(Meeting, "exchange", exchange)
    monkeypatch.setattr(ThreadedRunner, "launch", launch)
    monkeypatch.setattr(ThreadedRunner, "start_trace", start_trace, raising=False)
    monkeypatch.setattr(ThreadedRunner, "end_trace", end_trace, raising=False)
    for module in (tracer, moments, tracing):
        monkeypatch.setattr(module, "time", time)
    for rank, runner in enumerate(engine.runner.ranks):
        for layer in runner.model.layers:
            for name in ("mixer", "ffn"):
                part = Working(getattr(layer, name), lambda rank=rank: work(rank))  # type: ignore[misc]
                monkeypatch.setattr(layer, name, part)
    return time


def start_trace(runner: ThreadedRunner) -> int:
    return sum(rank.start_trace() for rank in runner.ranks)


def end_trace(runner: ThreadedRunner) -> list[RankTrace]:
    return [trace for rank in runner.ranks for trace in rank.end_trace()]


def judged(threaded: ThreadedEngine, time: VirtualTime, rows: int = 4) -> list[Finding]:
    """Of steps that only decode. The ranks pose as H100s whose weights take 0.7 of the least work to read."""
    engine, told = threaded.engine, list[StepTraces]()
    params = SamplingParams(temperature=0, max_tokens=STEPS + 6, ignore_eos=True)
    requests = [engine.add([5 + row, 9, 4], params) for row in range(rows)]
    while any(not request.output for request in requests):
        engine.step()
    EngineTracer(engine, STEPS, told.append)
    while engine.has_work:
        time.host += int(time.pause * US)
        engine.step()
    parts = 2 * len(threaded.runner.ranks[0].model.layers)
    weights = int(0.7 * min(time.work) * parts * 1e-6 * H100.bandwidth)
    ranks = [msgspec.structs.replace(rank, device="NVIDIA H100 80GB HBM3", weights=weights) for rank in told[0].ranks]
    return findings_of(picture_of(msgspec.structs.replace(told[0], ranks=ranks)))


def test_each_seeded_fault_is_found_and_nothing_else(engine: ThreadedEngine, virtual: VirtualTime) -> None:
    assert judged(engine, virtual) == []
    virtual.work[5] = 1.3 * virtual.work[0]
    (slow,) = judged(engine, virtual)
    assert (slow.code, slow.title[:6]) == ("slow_rank", "Rank 5")
    assert "30% more" in slow.found
    virtual.work[5], virtual.link = virtual.work[0], 2.0
    (link,) = judged(engine, virtual)
    assert link.code == "slow_link"
    assert "2.0 times" in link.found
    virtual.link, virtual.pause = 1.0, 200.0
    (host,) = judged(engine, virtual)
    assert (host.code, "0.20 ms" in host.found) == ("host_gaps", True)
    virtual.pause, virtual.work = 2.0, [6.0] * RANKS
    (lone,) = judged(engine, virtual, rows=1)
    assert lone.code == "collectives"
    assert "1 rows on 8 ranks" in lone.found
