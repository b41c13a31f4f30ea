"""Processes of Phalanx forked from one that has everything imported already, instead of a fresh Python for each.

What they do is the same, and what they start is forked too (`tests/spares.py`). How Phalanx itself starts ranks is the
subject of `runtime/test_processes.py`, and the servers of the fixture `locked` are started as a user does; these do not
use this.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import resource
import subprocess
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from tests.brake import BRAKE, obey
from tests.faults import FAULT, commit_fault
from tests.spares import Start, become, runs_phalanx, watched

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
_create_subprocess_exec = asyncio.create_subprocess_exec
_context.set_forkserver_preload([*_IMPORTED, "tests.forked"])


class ForkedPython:
    """As much of a `Popen` of `python -m module` as Phalanx and its tests ask for. `stdin` is a pipe."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        variables: dict[str, str],
        stdout: int = 1,
        stderr: int = 2,
        pass_fds: Sequence[int] = (),
        group: bool = False,
        most_files: int | None = None,
    ) -> None:
        reading, writing = os.pipe()
        heard, begun = os.pipe()
        start = Start(module, list(arguments), variables, [0, 1, 2, *pass_fds], group)
        files = [DupFd(file) for file in (reading, stdout, stderr, *pass_fds, begun)]
        self.stdin: Any = os.fdopen(writing, "wb")
        self.stdout: Any = None
        self._process = _context.Process(target=_run, args=(start, files, most_files), daemon=True)
        self._process.start()
        for file in (reading, begun):
            os.close(file)
        os.read(heard, 1)
        os.close(heard)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

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


def forked_popen(command: Sequence[str], env: dict[str, str], stderr: Any, **pipes: int) -> ForkedPython:
    """Instead of `subprocess.Popen`, of a module with pipes for standard input and output."""
    return _with_pipe(command, env, stderr.fileno())


def _with_pipe(command: Sequence[str], variables: dict[str, str], stderr: int, **more: Any) -> ForkedPython:
    reading, writing = os.pipe()
    process = ForkedPython(*command[3:], variables=variables, stdout=writing, stderr=stderr, **more)
    os.close(writing)
    process.stdout = os.fdopen(reading, "rb")
    return process


async def start_beside_loop(*command: str, **options: Any) -> Any:
    """Instead of `asyncio.create_subprocess_exec`, for what Phalanx starts beside its loop."""
    if not runs_phalanx(command):
        return await _create_subprocess_exec(*command, **options)
    with open(os.devnull, "wb") as nowhere:
        if options.get("stdout") is None:
            process = ForkedPython(*command[3:], variables=options["env"], group=True)
        else:
            kept = options["pass_fds"]
            process = _with_pipe(command, options["env"], nowhere.fileno(), pass_fds=kept, group=True)
    return await watched(process, process.sentinel)


def _run(start: Start, files: list[Any], most_files: int | None) -> None:
    gc.freeze()  # what is imported is no garbage, and not looked at it stays shared
    if most_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    if FAULT in start.variables:
        commit_fault(start.variables[FAULT])
    if BRAKE in start.variables:
        obey(Path(start.variables[BRAKE]))
    become(start, [file.detach() for file in files])
