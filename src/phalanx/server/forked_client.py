"""The server's side of processes that can be spared (`forked.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence

from phalanx.errors import ConfigError
from phalanx.runtime import child
from phalanx.server.forked import ANSWERED, ASKED, ENDED_BY, FRAME, HELLO, LOST, Lane

_START_LIMIT_S = 120.0
_PATIENCE = 10.0
_LARGEST_READ = 2**20
_STOPPED_AFTER_S = 2.0
"""A process that has not ended by then was stopped, and is killed."""


class Lost(Exception):
    """A process ended over a message, by itself or by its limits."""


class _Line:
    """One lane's connection: one message at a time."""

    def __init__(self, connection: socket.socket, lane: Lane) -> None:
        self.lane = lane
        self._connection = connection
        self._number = 0
        self._pid_fd = -1
        self._settled = asyncio.Event()
        self._settled.set()
        self._settling: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=_LARGEST_READ)

    async def ask(self, message: bytes) -> bytes:
        """What the process answers. Lost if it ends over it, or takes far longer than its CPU time would need.

        A caller that is cancelled takes the process along, so that the lane is free for the next one.
        """
        try:
            async with asyncio.timeout(_PATIENCE * self.lane.cpu_s):
                await self._settled.wait()
                self._number = self._number % 0xFFFF_FFFF + 1
                self._settled.clear()
                self._writer.write(FRAME.pack(ASKED, self._number, len(message)) + message)
                await self._writer.drain()
                answer = await self._answer()
        except (asyncio.CancelledError, TimeoutError) as error:
            if self._settling is None and not self._settled.is_set():
                self._settling = asyncio.create_task(self._settle())
            if isinstance(error, TimeoutError):
                raise Lost("it took too long") from None
            raise
        except Lost:
            self._settled.set()
            raise
        self._settled.set()
        return answer

    async def _answer(self) -> bytes:
        """The answer to the last message. Of processes that ended in between, nothing need be known."""
        while True:
            kind, body = await self._frame()
            if kind == ANSWERED:
                return body

    async def _frame(self) -> tuple[bytes, bytes]:
        kind, number, length = FRAME.unpack(await self._reader.readexactly(FRAME.size))
        body = await self._reader.readexactly(length)
        if kind == HELLO:
            self._watch(int(body))
        elif number != self._number:
            return b"", b""
        elif kind == LOST:
            raise Lost(_how(int(body)))
        return kind, body

    def _watch(self, pid: int) -> None:
        """A handle of the process: its number may be another's by the time it is to be killed."""
        self._forget_process()
        try:
            self._pid_fd = os.pidfd_open(pid)
        except OSError:
            self._pid_fd = -1

    async def _settle(self) -> None:
        """End the process and wait until it is told dead, or had just answered."""
        with contextlib.suppress(Lost, OSError, asyncio.IncompleteReadError):
            while self._pid_fd < 0:
                kind, _ = await self._frame()
                if kind == ANSWERED:
                    break
            else:
                self._signal(ENDED_BY)
                killing = asyncio.get_running_loop().call_later(_STOPPED_AFTER_S, self._signal, signal.SIGKILL)
                try:
                    await self._answer()
                finally:
                    killing.cancel()
        self._settling = None
        self._settled.set()

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pid_fd, signum)

    def _forget_process(self) -> None:
        if self._pid_fd >= 0:
            os.close(self._pid_fd)
            self._pid_fd = -1

    def close(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        self._forget_process()
        self._writer.close()


def _how(code: int) -> str:
    if code == -signal.SIGPROF:
        return "it took too much time"
    return f"its process was ended by signal {-code}" if code < 0 else f"its process exited with status {code}"


_Started = tuple[asyncio.subprocess.Process, list[_Line], bytes]


class Forked:
    """Runs a module that calls `forked.serve`, once it has loaded what it was given; starts it again if it is gone."""

    def __init__(self, module: str, lanes: Sequence[Lane]) -> None:
        self._module = module
        self._lanes = lanes
        self._message: asyncio.Future[bytes] | None = None
        self._starting: asyncio.Task[_Started] | None = None

    def spawn(self) -> None:
        """Start it, to import what it needs until it is given something to load."""
        self._message = asyncio.get_running_loop().create_future()
        self._starting = asyncio.create_task(self._spawn(self._message))

    async def start(self, message: bytes) -> bytes:
        """What the module says when it is ready. ConfigError if it does not come to that."""
        if self._message is None:
            self.spawn()
        assert self._message is not None
        self._message.set_result(message)
        return (await self._started())[2]

    async def ask(self, lane: int, message: bytes) -> bytes:
        """An answer from the lane; whoever asks must not do so twice at once."""
        _, lines, _ = await self._started()
        try:
            return await lines[lane].ask(message)
        except (OSError, asyncio.IncompleteReadError):
            raise Lost("the processes that do this were ended") from None

    async def _started(self) -> _Started:
        assert self._message is not None, "start comes first"
        if self._starting is None:
            self._starting = asyncio.create_task(self._spawn(self._message))
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        except ConfigError:
            if self._starting is starting:
                self._starting = None
            raise

    async def _spawn(self, message: asyncio.Future[bytes]) -> _Started:
        pairs = [socket.socketpair() for _ in self._lanes]
        theirs = [other.fileno() for _, other in pairs]
        process = await asyncio.create_subprocess_exec(
            *child.command(self._module),
            *map(str, theirs),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=child.environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES=""),
            pass_fds=theirs,
            preexec_fn=os.setpgrp,
        )
        for _, other in pairs:
            other.close()
        try:
            given = await asyncio.shield(message)
            async with asyncio.timeout(_START_LIMIT_S):
                ready = await _exchange(process, given)
                lines = [_Line(mine, lane) for (mine, _), lane in zip(pairs, self._lanes, strict=True)]
                for line in lines:
                    await line.open()
        except BaseException:
            await _end(process)
            raise
        if not ready:
            await _end(process)
            found = f"{self._module} ended with status {process.returncode} before it was ready."
            raise ConfigError("helper_failed", found, f"Run `python -m {self._module}` to see why.")
        self._watching = asyncio.create_task(self._watch(process, lines))
        return process, lines, ready

    async def _watch(self, process: asyncio.subprocess.Process, lines: list[_Line]) -> None:
        """Whoever waits for a process that is gone hears of it, and the next one starts another."""
        await process.wait()
        self._starting = None
        for line in lines:
            line.close()

    async def close(self) -> None:
        """End the processes, whatever they do."""
        starting, self._starting, self._message = self._starting, None, None
        if starting is None:
            return
        starting.cancel()
        (started,) = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(started, tuple):
            process, lines, _ = started
            self._watching.cancel()
            for line in lines:
                line.close()
            await _end(process)


async def _exchange(process: asyncio.subprocess.Process, message: bytes) -> bytes:
    """What it says to its first message; nothing if it ends over that."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(FRAME.pack(ASKED, 0, len(message)) + message)
        await process.stdin.drain()
        _, _, length = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
        return await process.stdout.readexactly(length)
    except (ConnectionError, asyncio.IncompleteReadError):
        return b""


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all it has forked: they are one group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
