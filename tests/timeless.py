"""An event loop in which waiting takes no time: a busy machine changes nothing about what comes first."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Selector(selectors.DefaultSelector):
    """Has a clock, which stands still while there is something to do and jumps to the next timer when there is not."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(None if timeout is None else 0.0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`. For what waits for timers alone: threads, processes and networks need time that passes."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)
