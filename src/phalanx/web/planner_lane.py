"""The server's end of a planner process."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import msgspec

from phalanx.runtime import child
from phalanx.server.errors import ApiError

LENGTH_BYTES = 4
_TIME_LIMIT_S = 30.0


class PlannerLane:
    """A process that answers one question at a time; it is started by the first and ends with this one.

    It shares no interpreter with the server: arithmetic in Python would hold up the tokens that are being streamed. A
    question that takes too long ends the process, and the next starts another.
    """

    def __init__(self, time_limit_s: float = _TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, kind: str, question: dict[str, Any]) -> bytes | dict[str, Any]:
        """The answer as JSON, or the fields of an error. Called by one thread at a time."""
        process = self._started()
        late = threading.Timer(self._time_limit_s, process.kill)
        late.start()
        try:
            body = _exchange(process, msgspec.json.encode({"kind": kind, "question": question}))
        except (EOFError, BrokenPipeError):
            self.close()
            found = f"The planner gave no answer: it may take {self._time_limit_s:g} s and 2 GiB."
            raise ApiError(503, f"{found} Ask for fewer GPUs or requests.", "plan_too_large") from None
        finally:
            late.cancel()
        told = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return bytes(told["answer"]) if "answer" in told else msgspec.json.decode(told["error"])

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                child.command("phalanx.web.planner_worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child.environment(),
            )
        return self._process


def _exchange(process: subprocess.Popen[bytes], message: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)
    process.stdin.flush()
    length = int.from_bytes(process.stdout.read(LENGTH_BYTES), "little")
    body = process.stdout.read(length)
    if not length or len(body) < length:
        raise EOFError
    return body
