"""Turnstile: so many requests begin in one turn of the event loop, however many come at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

MOST_AT_ONCE = 8


class Turnstile:
    """Thousands of connections may speak in the same moment. Those beyond the first few wait for later turns of the
    loop, so that answers under way go on in between. Who waits stands in the line of its address, and the lines take
    turns: a newcomer need not wait behind the thousands of another.
    """

    def __init__(self, most: int = MOST_AT_ONCE) -> None:
        self._most = self._left = most
        self._lines: OrderedDict[str, deque[Callable[[], object]]] = OrderedDict()
        self._turning = False

    def soon(self, go: Callable[[], object], whose: str = "") -> None:
        """Called now if there is room in this turn, else in a later one."""
        if self.passes():
            go()
        else:
            self.wait(go, whose)

    def passes(self) -> bool:
        """Whether there is room in this turn; then it is taken."""
        if not self._left or self._lines:
            return False
        self._left -= 1
        self._turn_soon()
        return True

    def wait(self, go: Callable[[], object], whose: str = "") -> None:
        """Called in a later turn."""
        self._lines.setdefault(whose, deque()).append(go)
        self._turn_soon()

    async def pass_through(self, whose: str = "") -> None:
        if not self.passes():
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def begin() -> None:
                if not turn.done():
                    turn.set_result(None)

            self.wait(begin, whose)
            await turn

    @asynccontextmanager
    async def limit(self, deadline: float) -> AsyncIterator[None]:
        """As `asyncio.timeout_at`; but of thousands that are late in one moment, few are told in a turn."""
        within = True
        async with asyncio.timeout(None) as limit:

            def end() -> None:
                if within:
                    limit.reschedule(deadline)

            timer = asyncio.get_running_loop().call_at(deadline, self.soon, end)
            try:
                yield
            finally:
                within = False
                timer.cancel()

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        self._left = self._most
        try:
            while self._lines and self._left:
                self._left -= 1
                self._next()()
        finally:
            if self._lines:
                self._turn_soon()

    def _next(self) -> Callable[[], object]:
        """The first one of the first line, which then is the last line."""
        whose, line = self._lines.popitem(last=False)
        go = line.popleft()
        if line:
            self._lines[whose] = line
        return go
