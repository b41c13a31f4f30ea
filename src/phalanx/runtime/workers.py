"""The ranks beside rank 0: what an executor asks of them, and those that run on this machine."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
from torch._C._distributed_c10d import Store

from phalanx.engine.step_plan import Beat
from phalanx.engine.whereabouts import PAGES, make_pages
from phalanx.fabric.group import FabricError, open_store
from phalanx.runtime import child
from phalanx.runtime.channel import Context
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.links import Links
from phalanx.runtime.memory_limit import fix_of
from phalanx.runtime.messages import Failure, Meeting, RankAssignment, RankReport
from phalanx.runtime.rank import Spot, local_spots

_CAUSE_WAIT_S = 2.0
_EXIT_WAIT_S = 3.0


@dataclass(frozen=True)
class Cause:
    """The rank that failed first of its own accord: its report if it left one, else what was seen of it."""

    rank: int
    failure: Failure | None
    seen: str
    code: str = "rank_died"
    fix: str | None = None


class Workers(Protocol):
    """The processes of ranks 1, 2, ..., started and addressed. `spot`, `store` and `host` are for rank 0."""

    config: EngineConfig
    spot: Spot
    host: str
    nodes: list[str]
    """The machine of every rank, rank 0 first; empty where all run on this one."""

    @property
    def pages(self) -> Path | None:
        """The file in which ranks say where they are, if they are all on this machine."""
        ...

    def store(self) -> Store: ...

    def send(self, frames: list[bytes]) -> None: ...

    def receive(self, timeout_ms: int) -> RankReport | None:
        """The next report, or None. FabricError if there is none and a rank is gone."""
        ...

    def check(self) -> None:
        """FabricError if a rank is gone. May be called from any thread."""
        ...

    def beats(self) -> list[Beat]: ...

    def started(self) -> None:
        """All ranks serve now."""
        ...

    def cause_of_death(self) -> Cause | None: ...

    def close(self) -> None: ...


class LocalWorkers:
    """Processes beside this one, and the folder, private to this user, in which they meet it."""

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        self.config = config
        spots = local_spots(config)
        self.spot = spots[0]
        self.host = "127.0.0.1"
        self.nodes: list[str] = []
        self.folder = Path(tempfile.mkdtemp(prefix="phalanx-"))
        self.pages = self.folder / PAGES
        make_pages(self.pages, config.tp)
        self.processes: dict[int, child.Process] = {}
        context: Context = zmq.Context()
        self._finalizer = weakref.finalize(self, _clean_up, self.processes, self.folder, context)
        token = secrets.token_hex(16)
        self.links = Links(context, f"ipc://{self.folder}/reports", f"ipc://{self.folder}/beats", token)
        for rank in range(1, config.tp):
            assignment = RankAssignment(
                config=config,
                model_path=str(model_path),
                rank=rank,
                spot=spots[rank],
                meeting=self._meeting(rank),
                token=token,
                failure=str(self._failure_file(rank)),
                pages=str(self.pages),
            )
            line = msgspec.json.encode(assignment)
            self.processes[rank] = child.start("phalanx.runtime.worker", line, child.environment())

    def _meeting(self, rank: int) -> Meeting:
        return Meeting(
            orders=f"ipc://{self.folder}/orders-{rank}",
            reports=self.links.reports.address,
            beats=self.links.beats.address,
            store=f"{self.folder}/rendezvous",
            host=self.host,
        )

    def _failure_file(self, rank: int) -> Path:
        return self.folder / f"failure-{rank}.json"

    def store(self) -> Store:
        return open_store(f"{self.folder}/rendezvous", self.config.tp)

    def send(self, frames: list[bytes]) -> None:
        self.links.send(frames)

    def receive(self, timeout_ms: int) -> RankReport | None:
        report = self.links.receive(timeout_ms)
        if report is None:
            self.check()
        return report

    def check(self) -> None:
        if any(process.poll() is not None for process in self.processes.values()):
            raise FabricError("a rank has died")

    def beats(self) -> list[Beat]:
        beats = []
        while (beat := self.links.next_beat(0)) is not None:
            beats.append(beat)
        return beats

    def started(self) -> None:
        return None

    def cause_of_death(self) -> Cause | None:
        deadline = time.monotonic() + _CAUSE_WAIT_S
        while True:
            statuses = {rank: process.poll() for rank, process in self.processes.items()}
            failures = {rank: self._failure(rank) for rank in self.processes}  # of those that have ended, all there is
            for rank, failure in failures.items():
                status = statuses[rank]
                if failure is not None and not failure.echo:
                    return Cause(rank, failure, "")
                if failure is None and status is not None:
                    return Cause(rank, None, seen_of(status), fix=fix_of(status))
            if time.monotonic() > deadline:
                return next((Cause(rank, failure, "") for rank, failure in failures.items() if failure), None)
            time.sleep(0.02)

    def _failure(self, rank: int) -> Failure | None:
        path = self._failure_file(rank)
        return msgspec.json.decode(path.read_bytes(), type=Failure) if path.exists() else None

    def close(self) -> None:
        self._finalizer()


def seen_of(status: int) -> str:
    """What an exit status tells of a process that left no report."""
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    return f"{how} without a report."


def _clean_up(processes: dict[int, child.Process], folder: Path, context: Context) -> None:
    """Closing a worker's standard input ends it; what does not end is killed."""
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
    deadline = time.monotonic() + _EXIT_WAIT_S
    for process in processes.values():
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    context.destroy(linger=0)
    shutil.rmtree(folder, ignore_errors=True)
