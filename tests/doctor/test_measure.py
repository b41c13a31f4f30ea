"""Real ranks on the CPU: their speed is measured, their sums are checked, and a rank that fails is named."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from phalanx.doctor import measure as measuring
from phalanx.doctor.facts import Corruption, Facts, GpuFacts, Measured, Software, System
from phalanx.doctor.measure import measure, ranks
from phalanx.doctor.measure.messages import Failed
from phalanx.doctor.measure.rates import _cpu_best, fp8_product
from phalanx.errors import ConfigError
from tests.forked import forked_popen

pytestmark = pytest.mark.slow

LAPTOP = Facts("2026-11-15T10:00:00Z", System("laptop", cpu="A CPU"), Software("3.11", "0", torch_sees_gpus=0))
ROOT = Path(__file__).parents[2]
INTS, FLOATS, HALVES = range(4), range(4, 8), range(8, 12)
"""Rounds of 8 KiB by dtype."""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    forkserver.ensure_running()
    before = {child.pid for child in psutil.Process().children()}
    yield
    left = [child for child in psutil.Process().children() if child.pid not in before]
    assert not left, left


def fork_workers(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with a fault or none, and not much to measure. They are forked: see `tests/forked.py`."""
    forked = SimpleNamespace(Popen=forked_popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(ranks, "subprocess", forked)
    monkeypatch.setattr(ranks, "WORKER", "tests.doctor.faulty_worker")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAULT", fault)


def measure_with(fault: str, monkeypatch: pytest.MonkeyPatch, count: int = 3) -> Measured:
    """Only the all-reduces, in processes of which one has a fault."""
    fork_workers(fault, monkeypatch)
    monkeypatch.setattr(measuring._Found, "rate", lambda self, count: None)
    return measure(LAPTOP, count)


def test_a_cpu_is_measured_with_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    fork_workers("none", monkeypatch)
    found = measure(LAPTOP, progress=stages.append)
    assert found.problem is None
    (rate,) = found.rates
    assert (rate.gpu, rate.device, rate.matmul_format) == (-1, "A CPU", "fp32")
    assert (rate.datasheet_gbs, rate.datasheet_tflops) == (None, None)
    assert 0.1 < rate.copy_gbs < 10_000
    assert 0.001 < rate.matmul_tflops < 100
    assert found.backend == "gloo"
    assert [each.size for each in found.all_reduces] == [8192, 65536, 524288, 4194304]
    for each in found.all_reduces:
        assert each.ranks == 2
        assert each.modelled_microseconds is None
        assert each.bus_gbs == pytest.approx(each.size / each.microseconds / 1e3)
    assert found.corruptions == ()
    assert found.checked_bytes == 2 * 3 * 4 * (8192 + 2**20)
    assert stages == ["copies and matrix products on the CPU", "all-reduces over 2 ranks"]


def test_every_wrong_sum_is_a_corruption_of_the_ranks_that_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit in rank 1; in rank 2 a zero with a sign, which compares equal and only the checksum sees; and a
    wrong number sent by rank 0, so that all ranks agree on a sum that is wrong. Larger sums are right."""
    found = measure_with("corrupts", monkeypatch)
    assert found.problem is None
    flipped = [Corruption(1, 8192, number) for number in INTS]
    signed = [Corruption(2, 8192, number) for number in FLOATS]
    everywhere = [Corruption(rank, 8192, number) for number in HALVES for rank in range(3)]
    assert found.corruptions == (*flipped, *signed, *everywhere)
    assert found.checked_bytes == 3 * 3 * 4 * (8192 + 2**20)
    first = found.all_reduces[0]
    assert first.ranks == 3
    assert first.bus_gbs == pytest.approx(4 / 3 * first.size / first.microseconds / 1e3)


@pytest.mark.parametrize(
    ("fault", "count", "words"),
    [
        ("is killed", 3, "Rank 1 was killed by signal 9 in a checked sum of 8 KiB over 3 ranks."),
        ("raises", 2, "Rank 1 failed in a checked sum of 8 KiB over 2 ranks: ValueError: the GPU fell off the bus"),
    ],
)
def test_a_rank_that_dies_is_named_and_what_was_measured_stays(
    fault: str, count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure_with(fault, monkeypatch, count)
    assert found.problem == words
    assert len(found.all_reduces) == 4
    assert (found.backend, found.corruptions) == ("gloo", ())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of who listens to the ranks: it goes on when a test says so."""
    now = [0.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_rank_that_is_stopped_is_named(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is, a second passes with each sign of life of the other."""
    listen = ranks.Ranks._next

    def hear(crew: ranks.Ranks, timeout: float) -> Any:
        heard = listen(crew, 60.0)
        stopped = psutil.Process(crew._ranks[1].process.pid).status() == psutil.STATUS_STOPPED
        if stopped and heard is not None and heard[0] == 0:
            clock[0] += 1.0
        return heard

    monkeypatch.setattr(ranks, "STUCK_S", ranks._QUIET_S + 1)
    monkeypatch.setattr(ranks, "_EXIT_WAIT_S", 0.1)
    monkeypatch.setattr(ranks.Ranks, "_next", hear)
    found = measure_with("is stopped", monkeypatch, 2)
    assert found.problem is not None
    assert found.problem.startswith("Rank 1 timed out in a checked sum of 8 KiB over 2 ranks: no sign of life for")


def test_a_pause_of_who_listens_is_no_rank_s_fault(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes up an hour later, and has the first of many reports before it."""
    listen = ranks.Ranks._next

    def pause_and_hear(crew: ranks.Ranks, timeout: float) -> Any:
        if not clock[0] and all(rank.steps for rank in crew._ranks):
            clock[0] = 3600.0
        return listen(crew, timeout)

    monkeypatch.setattr(ranks.Ranks, "_next", pause_and_hear)
    assert measure_with("none", monkeypatch, 2).problem is None
    assert clock[0]


def test_after_a_pause_the_cause_is_sought_in_all_that_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has lost a peer; that rank 1 has ended comes up an hour later."""
    (tmp_path / "log").touch()
    ended = SimpleNamespace(wait=lambda seconds: -9, poll=lambda: -9)
    crew = ranks.Ranks(
        "all-reduce", "cpu", 2, [ranks._Rank(cast(Any, ended), tmp_path / "log", 0.0, 0.0) for _ in "01"]
    )
    crew._heard = SimpleQueue()
    crew._heard.put((1, None))
    crew._ranks[0].hear(Failed("a peer is gone", echo=True))
    monkeypatch.setattr(ranks, "_CAUSE_WAIT_S", -3600.0)
    assert crew._cause_of_death() == "Rank 1 was killed by signal 9 in its start."


def test_a_rank_that_never_begins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It got less far than the other, however soon that is found."""
    monkeypatch.setattr(ranks, "STUCK_S", 1.0)
    monkeypatch.setattr(ranks, "_QUIET_S", math.inf)
    found = measure_with("never begins", monkeypatch, 2)
    assert found.problem is not None
    assert found.problem.startswith("Rank 1 timed out in its start: no step further for")


def test_a_process_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "WORKER", "no.such.module")
    found = measure(LAPTOP)
    assert found.problem is not None
    assert found.problem.startswith("Rank 0 exited with status 1 in its start. Its last words: ")
    assert "no" in found.problem.partition("last words")[2]
    assert found.rates == ()


def test_no_rank_outlives_a_measurement_killed_outright() -> None:
    script = (
        "from phalanx.doctor.measure.ranks import Ranks\n"
        "with Ranks('all-reduce', 'cpu', 2) as crew:\n"
        "    for _ in crew.reports():\n"
        "        print(*[rank.process.pid for rank in crew._ranks], flush=True)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("asked", [0, -1, 65])
def test_rank_counts_that_cannot_be_are_refused(asked: int) -> None:
    with pytest.raises(ConfigError, match="Use 1 to 64"):
        measure(LAPTOP, asked)


def test_gpus_that_torch_cannot_see_are_a_problem_and_no_measurement() -> None:
    facts = Facts("", System("box"), Software("3.11", "0", torch_sees_gpus=0), (GpuFacts(0, "NVIDIA H200"),))
    found = measure(facts)
    assert found == Measured(problem="torch sees none of the 1 GPUs, so nothing was measured.")


def test_an_fp8_product_is_a_product() -> None:
    """Its rate on a CPU means nothing; that the call is one torch understands does."""
    assert fp8_product(64, torch.device("cpu"), _cpu_best) > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_measured_beside_its_datasheet_and_nccl_sums_are_right() -> None:
    names = tuple(GpuFacts(index, torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count()))
    facts = Facts("", System(os.uname().nodename), Software("3.11", "0", torch_sees_gpus=len(names)), names)
    found = measure(facts)
    assert (found.problem, found.corruptions) == (None, ())
    for rate in found.rates:
        assert rate.datasheet_gbs is None or 0.3 < rate.copy_gbs / rate.datasheet_gbs < 1.05
        assert rate.datasheet_tflops is None or 0.2 < rate.matmul_tflops / rate.datasheet_tflops < 1.1
        assert rate.fp8_tflops is None or rate.fp8_tflops > rate.matmul_tflops
    alone = measuring._Found(facts, "cuda")
    alone.reduce(1)
    assert alone.times
