"""Sharing between clients: what is scarce is never one key's alone, and who waits has a turn of its own."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_TIMES_WHAT_IS_LEFT = 3


class Shares:
    """So many units of something. Where there are several keys, none may hold more than three times what is left.

    So one key alone gets three quarters, two get three sevenths each, and a newcomer always finds something free: the
    last unit, if there is no more.
    """

    def __init__(self, total: int, shared: bool) -> None:
        self.total = total
        self._shared = shared
        self._held: Counter[str] = Counter()

    @property
    def free(self) -> int:
        return self.total - self._held.total()

    @property
    def most_at_once(self) -> int:
        """What one key may hold while nobody else does."""
        return _TIMES_WHAT_IS_LEFT * self.total // (_TIMES_WHAT_IS_LEFT + 1)

    def held(self, key: str) -> int:
        return self._held.get(key, 0)

    def take(self, key: str, amount: int) -> bool:
        """Whether the key got them; they are to be given back."""
        left, held = self.free - amount, self.held(key)
        if left < 0 or (self._shared and held + amount > max(1, _TIMES_WHAT_IS_LEFT * left)):
            return False
        self._held[key] += amount
        return True

    def give(self, key: str, amount: int) -> None:
        self._held[key] -= amount
        if self._held[key] <= 0:
            del self._held[key]


class Turns:
    """Lets so many in at once. Of those who wait, each key has its turn, however many others wait for another."""

    def __init__(self, places: int = 1) -> None:
        self._places = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        await self._enter(key)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, key: str) -> None:
        if self._places > 0:
            self._places -= 1
            return
        let_in: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(let_in)
        try:
            await let_in
        except asyncio.CancelledError:
            if let_in.cancelled():
                self._forget(key, let_in)
            else:
                self._leave()
            raise

    def _leave(self) -> None:
        """The next key's first waiter takes the place; the key goes to the end of the line."""
        while self._waiting:
            key, line = self._waiting.popitem(last=False)
            let_in = line.popleft()
            if line:
                self._waiting[key] = line
            if not let_in.done():
                let_in.set_result(None)
                return
        self._places += 1

    def _forget(self, key: str, let_in: asyncio.Future[None]) -> None:
        line = self._waiting.get(key)
        if line is not None and let_in in line:
            line.remove(let_in)
            if not line:
                del self._waiting[key]
