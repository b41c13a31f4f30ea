"""The HTTP protocol with bounds: a head that is too large or too slow is refused before an application sees it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from phalanx.server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
HEAD_TIMEOUT_S = 30.0
LINGER_S = 1.0
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class BoundedHttp(HttpToolsProtocol):
    """Adds limits to uvicorn's protocol, and lets the application cut a connection whose client does not read.

    Offers to speak another protocol are not heard: with one, the parser would drop the request's body.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._problem = ApiError(400, "This is no valid HTTP request.", "bad_http")
        self._refused = False
        self._in_head = True
        self._untold_bytes = 0
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The parser tells of a header when it is whole; what it has taken in and not told is counted here."""
        if self._refused:
            return
        self._untold_bytes += len(data)
        super().data_received(_without_upgrade(data) if self._in_head else data)
        if self._in_head and self._untold_bytes > MAX_HEAD_BYTES and not self._refused:
            self._answer(_head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)
        self.scope["extensions"] = {"abort": self.transport.abort}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head(len(name) + len(value))

    def _count_head(self, size: int) -> None:
        self._untold_bytes -= size
        self._head_bytes += size
        if len(self.headers) > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._problem = _head_too_large()
            raise self._problem

    def on_headers_complete(self) -> None:
        self._head_timer.cancel()
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._untold_bytes = 0
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._answer(self._problem)

    def _head_is_late(self) -> None:
        if self._in_head and not self._refused and not self.transport.is_closing():
            self._answer(ApiError(408, f"The head was not complete after {HEAD_TIMEOUT_S:g} s.", "head_timeout"))

    def _answer(self, error: ApiError) -> None:
        """Closing at once would cost a client that still sends the answer: for a moment, what it sends is dropped."""
        self._refused = True
        body = msgspec.json.encode(error.body)
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status_code] + head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    end = data.find(b"\r\n\r\n")
    offer = _UPGRADE.search(data, 0, end if end >= 0 else len(data))
    return data if offer is None else data[: offer.start()] + data[offer.end() :]


def _head_too_large() -> ApiError:
    return ApiError(431, f"The head has more than {MAX_HEADERS} headers or {MAX_HEAD_BYTES} bytes.", "head_too_large")


PROTOCOL: dict[str, Any] = {"http": BoundedHttp, "ws": "none", "loop": "uvloop", "lifespan": "off"}
