"""Turnstile: so many requests begin in one turn of the event loop, however many come at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MOST_AT_ONCE = 16


class Turnstile:
    """Thousands of connections may speak in the same moment. Those beyond the first few wait for later turns of the
    loop, in the order they came, so that answers under way go on in between.
    """

    def __init__(self, most: int = MOST_AT_ONCE) -> None:
        self._most = self._left = most
        self._waiting: deque[Callable[[], object]] = deque()
        self._turning = False

    def passes(self) -> bool:
        """Whether there is room in this turn; then it is taken."""
        if not self._left or self._waiting:
            return False
        self._left -= 1
        self._turn_soon()
        return True

    def wait(self, go: Callable[[], object]) -> None:
        """Called in a later turn."""
        self._waiting.append(go)
        self._turn_soon()

    async def pass_through(self) -> None:
        if not self.passes():
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def begin() -> None:
                if not turn.done():
                    turn.set_result(None)

            self.wait(begin)
            await turn

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        self._left = self._most
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft()()
        if self._waiting:
            self._turn_soon()
