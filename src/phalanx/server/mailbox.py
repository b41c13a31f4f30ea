"""Mailbox: tokens of one HTTP request on their way from the engine to the client."""

from __future__ import annotations

import asyncio

from phalanx.server.errors import ApiError
from phalanx.server.messages import NewToken

MOST_UNREAD = 4096


class Mailbox:
    """Collects tokens of all choices of a request until its handler takes them, many at a time.

    A handler that is held up by a client who does not read leaves tokens here; with too many of them the mailbox
    closes, and `put` says so: the engine need not go on. Once a token has come it has `begun`.
    """

    def __init__(self) -> None:
        self.begun = False
        self._tokens: list[tuple[int, NewToken]] = []
        self._closed: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, choice: int, token: NewToken) -> bool:
        """False if nobody will ever take it."""
        if self._closed is None and len(self._tokens) >= MOST_UNREAD:
            self._tokens.clear()
            self.close(ApiError(408, f"{MOST_UNREAD} tokens were waiting to be read.", "slow_reader"))
        if self._closed is not None:
            return False
        self.begun = True
        self._tokens.append((choice, token))
        self._wake()
        return True

    def close(self, error: ApiError) -> None:
        """No more tokens will come: the handler hears why once it has taken what is here."""
        if self._closed is None:
            self._closed = error
            self._wake()

    async def take(self) -> list[tuple[int, NewToken]]:
        """All tokens that have come; waits for the first. Raises what closed the mailbox."""
        if not self._tokens and self._closed is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._tokens:
            assert self._closed is not None
            raise self._closed
        taken, self._tokens = self._tokens, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
