"""Door: how many connections there may be, and which go first when there are too many."""

from __future__ import annotations

import resource
from collections import Counter, OrderedDict
from ipaddress import IPv6Network
from typing import Protocol

from phalanx.server.turnstile import Turnstile

MOST_CONNECTIONS = 4096
_FILES_FOR_OTHER_USE = 128
_FEWEST = 16
_NETWORK_BITS = 64


class Visitor(Protocol):
    """A connection."""

    @property
    def address(self) -> str: ...

    def turn_out(self) -> None:
        """End at once."""
        ...


def origin(address: str) -> str:
    """Whose address it is: of IPv6, everyone has a whole network."""
    if ":" not in address:
        return address
    return str(IPv6Network((address.partition("%")[0], _NETWORK_BITS), strict=False))


def room_for_connections() -> int:
    """As many as there are file descriptors for, after raising that limit as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + _FILES_FOR_OTHER_USE
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(_FEWEST, min(MOST_CONNECTIONS, soft - _FILES_FOR_OTHER_USE))


class Door:
    """Counts connections, of which one address has three quarters at most. A newcomer beyond that takes the place of
    the one that has been idle for longest. Behind it, a turnstile keeps requests from beginning all at once, and one
    at the way out keeps connections from closing all at once.
    """

    def __init__(self, most: int = MOST_CONNECTIONS) -> None:
        self.turnstile = Turnstile()
        self.way_out = Turnstile()
        self._most = most
        self._most_of_one = max(1, most * 3 // 4)
        self._inside: Counter[str] = Counter()
        self._all = 0
        self._idle: OrderedDict[Visitor, None] = OrderedDict()
        self._idle_of: dict[str, OrderedDict[Visitor, None]] = {}

    def enter(self, visitor: Visitor) -> bool:
        """Every connection is let in. False if there is no place for it: then only the way out can be shown."""
        address = visitor.address
        self._inside[address] += 1
        self._all += 1
        self.rest(visitor)
        if self._inside[address] > self._most_of_one:
            return self._make_room(self._idle_of[address], visitor)
        return self._all <= self._most or self._make_room(self._idle, visitor)

    def _make_room(self, idle: OrderedDict[Visitor, None], newcomer: Visitor) -> bool:
        oldest = next(iter(idle))
        if oldest is newcomer:
            return False
        oldest.turn_out()
        self.leave(oldest)
        return True

    def rest(self, visitor: Visitor) -> None:
        """Nothing is being answered on this connection."""
        self._idle[visitor] = None
        self._idle_of.setdefault(visitor.address, OrderedDict())[visitor] = None

    def work(self, visitor: Visitor) -> None:
        """A request is being answered."""
        self._idle.pop(visitor, None)
        idle = self._idle_of.get(visitor.address)
        if idle is not None:
            idle.pop(visitor, None)
            if not idle:
                del self._idle_of[visitor.address]

    def leave(self, visitor: Visitor) -> None:
        """Once for each that has entered, unless it was turned out."""
        self.work(visitor)
        self._all -= 1
        self._inside[visitor.address] -= 1
        if not self._inside[visitor.address]:
            del self._inside[visitor.address]
