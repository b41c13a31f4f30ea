"""Measuring processes, one a rank: started, listened to, and none left behind."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from phalanx.doctor.measure.messages import (
    Alive,
    Began,
    DeviceKind,
    Failed,
    Finished,
    MeasureAssignment,
    MeasureReport,
    Task,
    report_decoder,
)
from phalanx.runtime import child

WORKER = "phalanx.doctor.measure.worker"
START_S = 180.0
"""A rank that has begun nothing for so long will not: Python, torch and CUDA start in seconds."""
STUCK_S = 60.0
"""A rank that gets no further for so long hangs."""
_QUIET_S = 3.0
"""A process that gave no sign of life for so long is stopped or stuck in the kernel."""
_POLL_S = 0.2
_CAUSE_WAIT_S = 2.0
_EXIT_WAIT_S = 3.0


class RankProblem(Exception):
    """Which rank failed, and how."""


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    log: Path
    last_alive: float
    last_step: float
    steps: int = 0
    where: str = "its start"
    failed: Failed | None = None
    closed: bool = False
    finished: bool = False

    def hear(self, report: MeasureReport | None) -> None:
        """None is the end of its reports."""
        self.last_alive = time.monotonic()
        if isinstance(report, Alive):
            return
        self.last_step = self.last_alive
        self.steps += 1
        if report is None:
            self.closed = True
        elif isinstance(report, Began):
            self.where = report.what
        elif isinstance(report, Failed):
            self.failed = report
        elif isinstance(report, Finished):
            self.finished = True

    def is_stuck(self, now: float) -> bool:
        return not self.finished and now - self.last_step > (STUCK_S if self.steps else START_S)


@dataclass
class Ranks:
    """Processes that do one task together. Leaving the block ends them."""

    task: Task
    device: DeviceKind
    count: int
    _ranks: list[_Rank] = field(default_factory=list)

    def __enter__(self) -> Ranks:
        self._folder = Path(tempfile.mkdtemp(prefix="phalanx-measure-"))
        self._heard: queue.SimpleQueue[tuple[int, MeasureReport | None]] = queue.SimpleQueue()
        seed = secrets.randbits(31)
        threads = max(1, (os.cpu_count() or 1) // self.count) if self.count > 1 else None
        try:
            for rank in range(self.count):
                assignment = MeasureAssignment(
                    self.task, self.device, rank, self.count, str(self._folder), seed, threads
                )
                self._start(assignment)
        except BaseException:
            self._close()
            raise
        return self

    def _start(self, assignment: MeasureAssignment) -> None:
        log = self._folder / f"rank-{assignment.rank}.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                child.command(WORKER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=child.environment(),
            )
        now = time.monotonic()
        self._ranks.append(_Rank(process, log, now, now))
        threading.Thread(target=self._listen, args=(assignment.rank, process), daemon=True).start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already: its silence is heard below
            process.stdin.write(msgspec.json.encode(assignment) + b"\n")
            process.stdin.flush()

    def _listen(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._heard.put((rank, report_decoder.decode(line)))
        self._heard.put((rank, None))

    def reports(self) -> Iterator[tuple[int, MeasureReport]]:
        """What ranks report, until all have finished. One that dies, raises or hangs raises RankProblem."""
        looked = time.monotonic()
        while not all(rank.finished for rank in self._ranks):
            heard = self._next(_POLL_S)
            now = time.monotonic()
            if now - looked > _QUIET_S / 2:
                self._count_anew(now, now - looked)
            looked = now
            if heard is not None:
                rank, report = heard
                if report is None or isinstance(report, Failed):
                    raise RankProblem(self._cause_of_death())
                yield rank, report
            if any(rank.is_stuck(time.monotonic()) for rank in self._ranks):
                raise RankProblem(self._who_hangs())

    def _count_anew(self, now: float, away_s: float) -> None:
        """This process itself was stopped: what ranks said meanwhile is still unread."""
        for rank in self._ranks:
            rank.last_alive = min(rank.last_alive + away_s, now)
            rank.last_step = min(rank.last_step + away_s, now)

    def _next(self, timeout: float) -> tuple[int, MeasureReport | None] | None:
        try:
            rank, report = self._heard.get(timeout=timeout)
        except queue.Empty:
            return None
        self._ranks[rank].hear(report)
        return rank, report

    def _cause_of_death(self) -> str:
        """When one rank ends, others fail because of it: the first that failed of its own accord is named."""
        deadline = time.monotonic() + _CAUSE_WAIT_S
        heard: object = self
        while heard is not None or time.monotonic() < deadline:
            for number, rank in enumerate(self._ranks):
                if rank.closed and rank.failed is None:
                    return self._how_it_ended(number, rank)
                if rank.failed is not None and not rank.failed.echo:
                    return f"Rank {number} failed in {rank.where}: {rank.failed.error}"
            heard = self._next(_POLL_S)
        number, rank = next((number, rank) for number, rank in enumerate(self._ranks) if rank.failed is not None)
        assert rank.failed is not None
        return f"Rank {number} lost a peer in {rank.where}: {rank.failed.error}"

    def _how_it_ended(self, number: int, rank: _Rank) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(_EXIT_WAIT_S)
        status = rank.process.poll()
        how = f"was killed by signal {-status}" if status and status < 0 else f"exited with status {status}"
        lines = rank.log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"Rank {number} {how} in {rank.where}." + (f" Its last words: {last}" if last else "")

    def _who_hangs(self) -> str:
        """A process without a sign of life; else the ranks that got least far, which the others wait for.

        Where all got equally far, the hang is between them, and all are named.
        """
        now = time.monotonic()
        waiting = {number: rank for number, rank in enumerate(self._ranks) if not rank.finished}
        quiet = [number for number, rank in waiting.items() if now - rank.last_alive > _QUIET_S]
        fewest = min(rank.steps for rank in waiting.values())
        blamed = quiet or [number for number, rank in waiting.items() if rank.steps == fewest]
        first = waiting[blamed[0]]
        who = f"Rank {blamed[0]}" if len(blamed) == 1 else f"Ranks {', '.join(map(str, blamed))}"
        why = "no sign of life" if quiet else "no step further"
        return f"{who} timed out in {first.where}: {why} for {now - first.last_step:.0f} s."

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        """Closing a process's standard input ends it; what does not end is killed."""
        for rank in self._ranks:
            assert rank.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.process.stdin.close()
        deadline = time.monotonic() + _EXIT_WAIT_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
