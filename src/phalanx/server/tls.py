"""TLS: a connection is counted, and has its time, from its first byte on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import uvicorn

from phalanx.errors import ConfigError
from phalanx.server.door import Door
from phalanx.server.options import ServeOptions

HANDSHAKE_TIMEOUT_S = 10.0
_ACCEPT_AGAIN_S = 0.1


def tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    """What is wrong with certificate or key is said before the model loads."""
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("bad_option", "Of --tls-cert and --tls-key, one is missing.", "Give both, or none.")
    for flag, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if not os.access(path, os.R_OK):
            raise ConfigError("bad_option", f"{flag} {path} cannot be read.", "Give a readable PEM file.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise ConfigError(
            "bad_option",
            f"{certificate} and {key} are no certificate and its key: {error.strerror or error}.",
            "Give PEM files that belong together, the key without a passphrase.",
        ) from None
    return context


class _Guest:
    """A connection that shakes hands."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.address = address
        self.turned_out = False
        self._connection = connection

    def turn_out(self) -> None:
        self.turned_out = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


class TlsListener:
    """Accepts connections, each of which has a place at the door while it shakes hands.

    Left to the event loop, those who come and never say a word would be neither counted nor hurried.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        door: Door,
        make_protocol: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self._listener = listener
        self._context = context
        self._door = door
        self._make_protocol = make_protocol
        self._tasks = {asyncio.create_task(self._accept())}

    def close(self) -> None:
        """Nobody is accepted any more, and nobody shakes hands any longer."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self) -> None:
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            shaking = asyncio.create_task(self._shake_hands(connection, address[0]))
            self._tasks.add(shaking)
            shaking.add_done_callback(self._tasks.discard)

    async def _shake_hands(self, connection: socket.socket, address: str) -> None:
        guest = _Guest(connection, address)
        self._door.enter(guest)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
        except OSError:
            connection.close()
        finally:
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
        if self._tls is None:
            await super().startup(sockets)
            return
        await super().startup([])
        protocol: Any = self.config.http_protocol_class
        make = partial(
            protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        listeners: list[Any] = [TlsListener(each, self._tls, self._door, make) for each in sockets or ()]
        self.servers += listeners
