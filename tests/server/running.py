"""A real server in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.brake import BRAKE, braked
from tests.forked import ForkedPython

START_S = 240


@dataclass
class Server:
    process: subprocess.Popen[bytes] | ForkedPython
    url: str
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text()

    def client(self, timeout: float = 120) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout)

    def health(self) -> httpx.Response:
        return httpx.get(self.url + "/health", timeout=60)

    def engine(self) -> psutil.Process:
        """The engine process: scheduler and rank 0."""
        (engine,) = [child for child in psutil.Process(self.process.pid).children() if _runs(child, "engine_process")]
        return engine

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank above 0; ranks are started in order."""
        workers = [child for child in self.engine().children() if _runs(child, "worker")]
        return sorted(workers, key=lambda worker: worker.create_time())[number - 1]

    def braked(self) -> AbstractContextManager[None]:
        """Within, a stream of 400 tokens takes 40 s, and no engine starts. Not for a fresh one."""
        return braked(_brake_of(self.log))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def _brake_of(log: Path) -> Path:
    return log.with_suffix(".brake")


def _runs(process: psutil.Process, module: str) -> bool:
    return process.name() == module or any(part.endswith(f".{module}") for part in process.cmdline())


@contextmanager
def running(
    model: Path, folder: Path, *options: str, fresh: bool = False, most_files: int | None = None
) -> Iterator[Server]:
    """A server on a free port, once it is ready. Its output goes to a log in the folder. Nothing is warmed ahead.

    A `fresh` one is started as a user would, with all its processes; else they are forked (`tests/forked.py`).
    """
    log = folder / f"server-{time.monotonic_ns()}.log"
    arguments = ("serve", str(model), "--port", "0", "--warm-up", "off", *options)
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", BRAKE: str(_brake_of(log))}
    with log.open("wb") as output:
        process = (
            subprocess.Popen(
                [sys.executable, "-m", "phalanx.cli", *arguments], stdout=output, stderr=output, env=variables
            )
            if fresh
            else ForkedPython(
                "phalanx.cli",
                *arguments,
                variables=variables,
                stdout=output.fileno(),
                stderr=output.fileno(),
                most_files=most_files,
            )
        )
    try:
        yield Server(process, _url(process, log), log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes] | ForkedPython, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(r"serves \S+ at (\S+)/v1 ", log.read_text())
        if found:
            return found.group(1)
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


def eventually(condition, within: float = 60.0) -> bool:  # type: ignore[no-untyped-def]
    """Whether it comes true in time. The longer it takes, the less often it is asked for: a tenth of that is lost."""
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < within:
        if condition():
            return True
        time.sleep(min(max(0.02, waited / 10), 0.25))
    return False


def pid_of(pid_fd: int) -> int:
    fields = dict(line.split(":\t") for line in Path(f"/proc/self/fdinfo/{pid_fd}").read_text().splitlines())
    return int(fields["Pid"])
