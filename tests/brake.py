"""A brake on a server's engines: a stream runs and an engine is away for as long as a test needs to look."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.engine.core import Engine
from phalanx.runtime import start

BRAKE = "ENGINE_BRAKE"
_STEP_S = 0.1
"""400 tokens take 40 s."""


@contextmanager
def braked(brake: Path) -> Iterator[None]:
    """Within, steps are slow and no engine starts."""
    brake.touch()
    try:
        yield
    finally:
        brake.unlink()


def obey(brake: Path) -> None:
    """In this process and in those forked from it."""
    step, start_engine = Engine.step, start.start_engine

    def step_slowly(self: Engine) -> list[Any]:
        if brake.exists():
            time.sleep(_STEP_S)
        return step(self)

    def start_late(*given: Any) -> Engine:
        while brake.exists():
            time.sleep(0.02)
        return start_engine(*given)

    Engine.step = step_slowly  # type: ignore[method-assign]
    start.start_engine = start_late
