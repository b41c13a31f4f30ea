"""Arrivals: connections are accepted, counted and let in, so many in a turn of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import uvicorn

from phalanx.server.door import Door, origin

log = logging.getLogger("phalanx.server")

ACCEPTED_AT_ONCE = 128
HANDSHAKE_TIMEOUT_S = 10.0
_ACCEPT_AGAIN_S = 0.1


class _Guest:
    """A connection that was accepted: it waits to be let in, or shakes hands."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.address = address
        self.connection = connection
        self.waits = True
        self.turned_out = False

    def turn_out(self) -> None:
        self.turned_out = True
        if self.waits:
            self.connection.close()
        else:
            self.break_off()

    def break_off(self) -> None:
        """While it is let in, the event loop has the connection: it is the one to close it, and to say so."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Arrivals:
    """Takes connections from a socket that listens. Each has a place at the door from then on, also while it waits for
    its turn, or shakes hands.

    Left to the event loop, one or two are accepted in a turn: the kernel's line overflows where thousands come, and who
    finds it full tries again after a second. To accept costs little, so that line is kept short; what costs more waits
    at the door's turnstile. And those who come over TLS and never say a word would be neither counted nor hurried.
    """

    def __init__(
        self,
        listener: socket.socket,
        door: Door,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._door = door
        self._make_protocol = make_protocol
        self._tls = tls
        self._entering: dict[asyncio.Task[Any], _Guest] = {}
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Nobody is accepted any more, or let in, and nobody shakes hands any longer."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        if self._again is not None:
            self._again.cancel()
        for guest in self._entering.values():
            guest.break_off()

    async def wait_closed(self) -> None:
        """As a server's: those who wait for their turn are sent off by then."""

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError:
                self._loop.remove_reader(self._listener)
                self._again = self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            guest = _Guest(connection, origin(address[0]))
            self._door.enter(guest)
            self._door.turnstile.soon(partial(self._let_in, guest), guest.address)

    def _let_in(self, guest: _Guest) -> None:
        if guest.turned_out:
            return
        if self._closed:
            guest.turn_out()
            self._door.leave(guest)
            return
        guest.waits = False
        guest.connection.setblocking(False)
        limit = HANDSHAKE_TIMEOUT_S if self._tls is not None else None
        task = self._loop.create_task(
            self._loop.connect_accepted_socket(
                self._make_protocol, guest.connection, ssl=self._tls, ssl_handshake_timeout=limit
            )
        )
        self._entering[task] = guest
        task.add_done_callback(self._is_in)

    def _is_in(self, task: asyncio.Task[Any]) -> None:
        """Or not, and then it is closed."""
        guest = self._entering.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError):
            log.error("a connection could not be set up", exc_info=error)
        if error is not None or task.cancelled():
            guest.connection.close()
        if not guest.turned_out:
            self._door.leave(guest)


class HttpServer(uvicorn.Server):
    """Leaves signals to others. With a context, it speaks TLS."""

    def __init__(self, config: uvicorn.Config, door: Door, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._door = door
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        protocol: Any = self.config.http_protocol_class
        make = partial(
            protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        arrivals: list[Any] = [Arrivals(each, self._door, make, self._tls) for each in sockets or ()]
        self.servers += arrivals
