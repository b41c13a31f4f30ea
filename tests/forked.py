"""Processes of Phalanx forked from one that has everything imported already, instead of a fresh Python for each.

What they do is the same, and what they start is forked too (`tests/spares.py`). How Phalanx itself starts ranks is the
subject of `runtime/test_processes.py`, and the servers of the fixture `locked` are started as a user does; these do not
use this.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
from multiprocessing.reduction import DupFd
from typing import IO, Any

from tests.faults import FAULT, commit_fault
from tests.spares import Start, become

_IMPORTED = (
    "phalanx.runtime.worker",
    "phalanx.server.engine_process",
    "phalanx.server.prepare",
    "phalanx.server.grammar.worker",
    "phalanx.web.planner_worker",
    "phalanx.web.serve",
    "phalanx.cli",
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*_IMPORTED, "tests.forked"])


class ForkedPython:
    """As much of a `Popen` of `python -m module` as Phalanx and its tests ask for."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        variables: dict[str, str],
        output: IO[bytes] | None = None,
        most_files: int | None = None,
    ) -> None:
        reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "wb")
        told = output.fileno() if output is not None else 2
        start = Start(module, list(arguments), variables, [0, 1, 2])
        files = [DupFd(reading), DupFd(1 if output is None else told), DupFd(told)]
        self._process = _context.Process(target=_run, args=(start, files, most_files), daemon=True)
        self._process.start()
        os.close(reading)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def forked_rank(module: str, line: bytes, variables: dict[str, str]) -> Any:
    """Instead of `phalanx.runtime.child.start`."""
    process = ForkedPython(module, variables=variables)
    process.stdin.write(line + b"\n")
    process.stdin.flush()
    return process


def _run(start: Start, files: list[Any], most_files: int | None) -> None:
    if most_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    if FAULT in start.variables:
        commit_fault(start.variables[FAULT])
    become(start, [file.detach() for file in files])
