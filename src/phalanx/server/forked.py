"""Work that may hang or burst, done in processes that can be spared: forked from one that has loaded everything.

A lane is a socket with a process at its other end, which answers one message after the other within limits of CPU time
and memory. When it ends, another is forked in its place within milliseconds.

Frames both ways: a kind, the number of the message, the length, the body.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

FRAME = struct.Struct("<cII")
HELLO, ASKED, ANSWERED, LOST = b"H", b"Q", b"A", b"L"

ENDED_BY = signal.SIGTERM
"""What ends the process of a lane whose message nobody waits for any more."""

_REPLACED_BEYOND_BYTES = 64 * 2**20
_WELL, _GROWN = 0, 3
_NUMBER = struct.Struct("<I")

Answering = Callable[[bytes], bytes]


class Lane(msgspec.Struct, frozen=True):
    """What one message may cost, and how the process stands back behind others."""

    cpu_s: float
    memory_bytes: int = 2**30
    niceness: int = 0


def serve(sockets: Sequence[socket.socket], lanes: Sequence[Lane], answer: Answering) -> None:
    """Keep a process on every lane until the other ends are closed. For a process with one thread.

    To fork takes time too: this process stands back as far as all its lanes do.
    """
    least = min(lane.niceness for lane in lanes)
    os.nice(least)
    lanes = [msgspec.structs.replace(lane, niceness=lane.niceness - least) for lane in lanes]
    underway = mmap.mmap(-1, _NUMBER.size * len(lanes))
    numbers: dict[int, int] = {_fork(index, sockets, lanes, answer, underway): index for index in range(len(lanes))}
    while numbers:
        pid, status = os.wait()
        index = numbers.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == _WELL:
            continue
        (number,) = _NUMBER.unpack_from(underway, index * _NUMBER.size)
        if number and not _told(sockets[index], LOST, number, str(code).encode()):
            continue
        numbers[_fork(index, sockets, lanes, answer, underway)] = index


def _fork(
    index: int, sockets: Sequence[socket.socket], lanes: Sequence[Lane], answer: Answering, underway: mmap.mmap
) -> int:
    _NUMBER.pack_into(underway, index * _NUMBER.size, 0)
    pid = os.fork()
    if pid == 0:
        for other, unused in enumerate(sockets):
            if other != index:
                unused.close()
        _work(sockets[index], lanes[index], answer, memoryview(underway)[index * _NUMBER.size :])
    return pid


def _work(connection: socket.socket, lane: Lane, answer: Answering, underway: memoryview) -> NoReturn:
    limit_memory(lane.memory_bytes)
    os.nice(lane.niceness)
    at_first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = connection.makefile("rb")
    _told(connection, HELLO, 0, str(os.getpid()).encode())
    while connection.recv(1, socket.MSG_PEEK):
        with _whole():
            _, number, length = FRAME.unpack(stream.read(FRAME.size))
            _NUMBER.pack_into(underway, 0, number)
            message = stream.read(length)
        signal.setitimer(signal.ITIMER_PROF, lane.cpu_s)
        body = answer(message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        with _whole():
            _told(connection, ANSWERED, number, body)
            _NUMBER.pack_into(underway, 0, 0)
        if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_first) * 1024 > _REPLACED_BEYOND_BYTES:
            os._exit(_GROWN)
    os._exit(_WELL)


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """A frame is read and written whole before `ENDED_BY` ends the process: the rest would be taken for the next."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {ENDED_BY})
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {ENDED_BY})


def limit_memory(more_bytes: int) -> None:
    """Of this process, to what it has and so much more."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def survives(work: Callable[[], object], lane: Lane) -> bool:
    """Whether work ends, in a process of its own with a lane's limits. What it finds is lost."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == _WELL
    limit_memory(lane.memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, lane.cpu_s)
    with contextlib.suppress(Exception):
        work()
        os._exit(_WELL)
    os._exit(1)


def _told(connection: socket.socket, kind: bytes, number: int, body: bytes) -> bool:
    """False where nobody listens any more."""
    try:
        connection.sendall(FRAME.pack(kind, number, len(body)) + body)
    except OSError:
        return False
    return True


def read_start() -> tuple[list[socket.socket], bytes]:
    """In a process that `Forked` has started: its lanes, and the message it was given to begin with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    _, _, length = FRAME.unpack(sys.stdin.buffer.read(FRAME.size))
    return sockets, sys.stdin.buffer.read(length)


def say_ready(body: bytes) -> None:
    """The one thing written to standard output. What libraries print there later goes to standard error."""
    sys.stdout.buffer.write(FRAME.pack(ANSWERED, 0, len(body)) + body)
    sys.stdout.buffer.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
