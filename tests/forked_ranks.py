"""Ranks forked from a process that has torch imported already, instead of a fresh Python for each.

What a rank does is the same. How Phalanx itself starts them is the subject of `runtime/test_processes.py`, which does
not use this.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.reduction import DupFd
from typing import Any

from phalanx.runtime import worker
from tests.faults import FAULT, commit_fault

_RANK = "phalanx.runtime.worker"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([_RANK])


class ForkedRank:
    """As much of a `Popen` as Phalanx asks of its ranks."""

    def __init__(self, module: str, line: bytes, variables: dict[str, str]) -> None:
        assert module == _RANK
        reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "wb")
        self._process = _context.Process(target=_run, args=(DupFd(reading), variables), daemon=True)
        self._process.start()
        os.close(reading)
        self.stdin.write(line + b"\n")
        self.stdin.flush()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(_RANK, timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(reading: Any, variables: dict[str, str]) -> None:
    os.dup2(reading.detach(), 0)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(variables)
    if FAULT in variables:
        commit_fault(variables[FAULT])
    worker.main()
