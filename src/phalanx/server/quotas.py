"""Quotas: what a key may use in a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.server.errors import ApiError
from phalanx.server.keys import KeyRing

_MINUTE_S = 60.0


@dataclass
class _Level:
    """What is left of a minute's allowance. It is full at first, and fills again all the time."""

    left: float
    at: float

    def fill(self, limit: int, now: float) -> None:
        self.left = min(limit, self.left + (now - self.at) * limit / _MINUTE_S)
        self.at = now


class Quotas:
    """Requests and tokens a minute, by key. Tokens of prompts count before the request is let in, those of answers when
    it has ended: they may lead into debt, which is waited off."""

    def __init__(self, keys: KeyRing, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._levels: dict[tuple[str, str], _Level] = {}

    def take(self, client: str, tokens: int) -> None:
        """ApiError if the key has used up its minute; its header says when to come back."""
        wanted = self._limited(client, tokens)
        waits = {what: (min(amount, limit) - level.left) * _MINUTE_S / limit for what, amount, limit, level in wanted}
        for what, _, limit, _ in wanted:
            if waits[what] > 0:
                raise ApiError(
                    429,
                    f"This key may use {limit} {what} a minute, and has used them.",
                    "rate_limit_exceeded",
                    headers={"retry-after": str(math.ceil(max(waits.values())))},
                )
        for _, amount, _, level in wanted:
            level.left -= amount

    def give_back(self, client: str, tokens: int) -> None:
        """Of a request that was not let in after all."""
        for _, amount, _, level in self._limited(client, tokens):
            level.left += amount

    def spend(self, client: str, tokens: int) -> None:
        """Tokens of an answer."""
        for what, amount, _, level in self._limited(client, tokens):
            if what == "tokens":
                level.left -= amount

    def _limited(self, client: str, tokens: int) -> list[tuple[str, int, int, _Level]]:
        """What there is a limit for, with the amount asked, the limit and what is left of it now."""
        key = self._keys.of(client)
        if key is None:
            return []
        now, found = self._clock(), []
        for what, amount, limit in (
            ("requests", 1, key.requests_per_minute),
            ("tokens", tokens, key.tokens_per_minute),
        ):
            if limit is not None:
                level = self._levels.setdefault((client, what), _Level(limit, now))
                level.fill(limit, now)
                found.append((what, amount, limit, level))
        return found
