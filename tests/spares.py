"""Processes that wait, with everything imported, to become one that Phalanx starts: a fork takes milliseconds, a fresh
Python with torch and transformers four seconds.

A process gets its spares while it has one thread. They are its children, as what it starts always was. When none is
left, or something else is to be run, it starts a fresh Python.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import os
import runpy
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

SPARES = {"phalanx.cli": 5, "phalanx.server.engine_process": 3}
"""How many a module gets: engines, what reads requests, compiles grammars and plans; ranks."""

_PYTHON = [sys.executable, "-P", "-m"]
_MOST_BYTES = 2**20
_MOST_FILES = 64


class Start(msgspec.Struct):
    """What a process is to run. Files come beside it, to be known by these numbers."""

    module: str
    arguments: list[str]
    variables: dict[str, str]
    numbers: list[int]
    group: bool = False
    """Whether it leads a process group of its own."""


def become(start: Start, files: Sequence[int]) -> NoReturn:
    """Be what `python -m module` would be, to its end. The last of the files is told when it has begun."""
    if start.group:
        os.setpgrp()
    os.write(files[-1], b".")
    os.close(files[-1])
    _place(files[:-1], start.numbers)
    os.environ.clear()
    os.environ.update(start.variables)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = [start.module, *start.arguments]
    Path("/proc/self/comm").write_text(start.module.rpartition(".")[2])
    _customise(start.variables)
    _keep_spares(SPARES.get(start.module, 0))
    code: Any = 0
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
            runpy.run_module(start.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _dismiss_spares()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _customise(variables: dict[str, str]) -> None:
    """As a fresh Python does on its way up."""
    for folder in filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)):
        if (custom := Path(folder, "sitecustomize.py")).is_file():
            runpy.run_path(str(custom))


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """These files under these numbers, whichever they had."""
    above = max([*files, *numbers]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


_spares: list[tuple[int, socket.socket]] = []
_fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]
_create_subprocess_exec = asyncio.create_subprocess_exec


def _dismiss_spares() -> None:
    while _spares:
        pid, orders = _spares.pop()
        orders.close()
        os.waitpid(pid, 0)


def _keep_spares(count: int) -> None:
    for _ in range(count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _wait(theirs)
        theirs.close()
        _spares.append((pid, ours))
    subprocess._fork_exec = _use_spare  # type: ignore[attr-defined]
    asyncio.create_subprocess_exec = _start_beside_loop  # type: ignore[assignment]


def _wait(orders: socket.socket) -> NoReturn:
    """Until told what to become, or until nobody is left to tell it."""
    for _, sibling in _spares:
        sibling.close()
    _spares.clear()
    Path("/proc/self/comm").write_text("spare")
    message, files, _, _ = socket.recv_fds(orders, _MOST_BYTES, _MOST_FILES)
    if message:
        become(msgspec.json.decode(message, type=Start), [*files, orders.detach()])
    os._exit(0)


def runs_phalanx(command: Sequence[str]) -> bool:
    return list(command[:3]) == _PYTHON and command[3].startswith("phalanx.")


def _use_spare(words: Sequence[str | bytes], *given: Any) -> int:
    """As `_posixsubprocess.fork_exec`, with a spare where a module of Phalanx is to be run."""
    command = [os.fsdecode(word) for word in words]
    setting_up = given[20]
    if not _spares or not runs_phalanx(command) or setting_up not in (None, os.setpgrp):
        return _fork_exec(words, *given)
    _, _, kept, _, variables, stdin, _, _, stdout, _, stderr, _, errors = given[:13]
    pipes = [own if end == -1 else end for own, end in enumerate((stdin, stdout, stderr))]
    passed = [file for file in kept if file != errors]
    told = Start(command[3], command[4:], _decoded(variables), [0, 1, 2, *passed], group=setting_up is not None)
    pid, orders = _spares.pop(0)
    with orders:
        socket.send_fds(orders, [msgspec.json.encode(told)], [*pipes, *passed])
        orders.recv(1)
    return pid


def _decoded(variables: Sequence[bytes] | None) -> dict[str, str]:
    if variables is None:
        return dict(os.environ)
    return dict(os.fsdecode(each).split("=", 1) for each in variables)


async def _start_beside_loop(*words: Any, **options: Any) -> Any:
    """As `asyncio.create_subprocess_exec`, through `subprocess`: uvloop starts processes by itself."""
    if not _spares:
        return await _create_subprocess_exec(*words, **options)
    process = subprocess.Popen(words, **options)
    return await watched(process, os.pidfd_open(process.pid))


async def watched(process: Any, end: int) -> WatchedProcess:
    """A process with its pipes in the running loop. `end` is a file that can be read once it has ended."""
    loop = asyncio.get_running_loop()
    stdin = stdout = None
    if process.stdin is not None:
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        transport, _ = await loop.connect_write_pipe(lambda: protocol, process.stdin)
        stdin = asyncio.StreamWriter(transport, protocol, None, loop)
    if process.stdout is not None:
        stdout = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), process.stdout)
    return WatchedProcess(process, end, stdin, stdout)


class WatchedProcess:
    """As much of asyncio's process as Phalanx asks of it."""

    def __init__(
        self, process: Any, end: int, stdin: asyncio.StreamWriter | None, stdout: asyncio.StreamReader | None
    ) -> None:
        self._process, self.stdin, self.stdout = process, stdin, stdout
        self.pid: int = process.pid
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(end, self._end, end)

    def _end(self, file: int) -> None:
        self._loop.remove_reader(file)
        self._process.wait()
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        await asyncio.shield(self._ended)
        return self._process.wait()
