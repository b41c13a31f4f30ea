"""A real server in a process of its own, as a user would start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

START_S = 240


@dataclass
class Server:
    process: subprocess.Popen[bytes]
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
        workers = [child for child in self.engine().children() if _runs(child, "runtime.worker")]
        return sorted(workers, key=lambda worker: worker.create_time())[number - 1]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def _runs(process: psutil.Process, module: str) -> bool:
    return any(part.endswith(module) for part in process.cmdline())


@contextmanager
def running(model: Path, folder: Path, *options: str) -> Iterator[Server]:
    """A server on a free port, once it is ready. Its output goes to a log in the folder. Nothing is warmed ahead."""
    log = folder / f"server-{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "phalanx.cli", "serve", str(model), "--port", "0", "--warm-up", "off", *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
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


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(r"serves \S+ at (\S+)/v1 ", log.read_text())
        if found:
            return found.group(1)
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


def eventually(condition, within: float = 60.0) -> bool:  # type: ignore[no-untyped-def]
    """Whether it comes true in time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False
