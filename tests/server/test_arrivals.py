"""Thousands who come at once: they are taken in soon, few of them in a turn of the loop, and address by address."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
import uvloop

from phalanx.server.arrivals import ACCEPTED_AT_ONCE, Arrivals
from phalanx.server.door import Door
from phalanx.server.turnstile import MOST_AT_ONCE

HERE = ("127.0.0.1", 0)
CROWD = 300


class Inside(asyncio.Protocol):
    """A connection that was let in, and has its place."""

    def __init__(self, street: Street) -> None:
        self._door, self._people = street.door, street.inside

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.address = transport.get_extra_info("peername")[0]
        self._people.append(self)
        self._door.enter(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._door.leave(self)

    def turn_out(self) -> None:
        self._transport.close()


class Street:
    """A socket that listens, those who come to it, and those who were let in, in that order."""

    def __init__(self, stack: ExitStack, listener: socket.socket, most: int = 4096) -> None:
        self.listener = stack.enter_context(listener)
        self.door, self.inside = Door(most), list[Inside]()
        self._stack = stack

    def come(self, count: int, address: str = "127.0.0.1") -> list[socket.socket]:
        """The kernel shakes hands: nobody needs to have been accepted."""
        return [
            self._stack.enter_context(socket.create_connection(self.listener.getsockname(), 60, (address, 0)))
            for _ in range(count)
        ]

    def open(self) -> Arrivals:
        return Arrivals(self.listener, self.door, lambda: Inside(self))


def run(scene: Callable[[ExitStack], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as stack:
        runner.run(asyncio.wait_for(scene(stack), 60))


def test_they_are_accepted_soon_and_let_in_few_at_a_time() -> None:
    async def scene(stack: ExitStack) -> None:
        street = Street(stack, socket.create_server(HERE, backlog=512))
        street.come(CROWD)
        arrivals = street.open()
        accepted, let_in = [0], [0]
        while len(street.inside) < CROWD:
            await asyncio.sleep(0)
            accepted.append(max(accepted[-1], street.door._inside.total()))
            let_in.append(len(street.inside))
        arrivals.close()
        turns = next(turn for turn, inside in enumerate(accepted) if inside >= CROWD)
        assert turns <= 3 * CROWD // ACCEPTED_AT_ONCE
        assert max(after - before for before, after in pairwise(let_in)) <= MOST_AT_ONCE

    run(scene)


def test_one_of_another_address_does_not_wait_behind_them() -> None:
    async def scene(stack: ExitStack) -> None:
        street = Street(stack, socket.create_server(HERE, backlog=512))
        street.come(CROWD)
        street.come(1, "127.0.0.2")
        arrivals = street.open()
        while len(street.inside) <= CROWD:
            await asyncio.sleep(0)
        arrivals.close()
        assert [each.address for each in street.inside].index("127.0.0.2") < CROWD // 2

    run(scene)


def test_who_is_turned_out_while_it_waits_is_closed_and_never_let_in() -> None:
    async def scene(stack: ExitStack) -> None:
        street = Street(stack, socket.create_server(HERE, backlog=512), most=8)
        crowd = street.come(ACCEPTED_AT_ONCE)
        arrivals = street.open()
        while len(street.inside) < MOST_AT_ONCE or street.door.turnstile._lines:
            await asyncio.sleep(0)
        arrivals.close()
        assert len(street.inside) <= MOST_AT_ONCE + 6
        assert street.door._inside.total() <= 6
        assert sum(not each.recv(1) for each in crowd[MOST_AT_ONCE:-6]) == ACCEPTED_AT_ONCE - MOST_AT_ONCE - 6

    run(scene)


def test_those_who_wait_when_it_closes_are_sent_off() -> None:
    async def scene(stack: ExitStack) -> None:
        street = Street(stack, socket.create_server(HERE, backlog=512))
        crowd = street.come(100)
        arrivals = street.open()
        while not street.inside:
            await asyncio.sleep(0)
        arrivals.close()
        while street.door.turnstile._lines or arrivals._entering:
            await asyncio.sleep(0)
        assert street.door._inside.total() <= len(street.inside) < 100
        assert sum(not each.recv(1) for each in crowd[len(street.inside) :]) == 100 - len(street.inside)
        await arrivals.wait_closed()

    run(scene)


@pytest.mark.parametrize("turns", range(5))
def test_who_comes_in_the_moment_it_closes_does_not_stay(turns: int) -> None:
    async def scene(stack: ExitStack) -> None:
        street = Street(stack, socket.create_server(HERE))
        street.come(1)
        arrivals = street.open()
        while not street.door._inside.total():
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        arrivals.close()
        for each in street.inside:
            each.turn_out()
        while street.door._inside.total():
            await asyncio.sleep(0.01)

    run(scene)


def test_without_file_descriptors_it_tries_again() -> None:
    class Short(socket.socket):
        fails = 2

        def accept(self) -> tuple[socket.socket, Any]:
            if self.fails:
                self.fails -= 1
                raise OSError(errno.EMFILE, "none left")
            return super().accept()

    async def scene(stack: ExitStack) -> None:
        listener = Short(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(HERE)
        listener.listen()
        street = Street(stack, listener)
        street.come(2)
        arrivals = street.open()
        while len(street.inside) < 2:
            await asyncio.sleep(0.01)
        arrivals.close()
        assert not listener.fails

    run(scene)
