"""The HTTP protocol with bounds: nothing that a connection does, or leaves undone, holds a place for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from phalanx.server.door import Door, origin
from phalanx.server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
MAX_PIPELINED = 64
HEAD_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 60.0
STUCK_WRITE_S = 120.0
CLOSE_S = 10.0
LINGER_S = 1.0
ALWAYS_SERVED = "/live"
_FRAMING = (b"content-length", b"transfer-encoding")


class BoundedHttp(HttpToolsProtocol):
    """Adds limits to uvicorn's protocol, and lets the application cut a connection whose client does not read.

    At any time a connection waits for a head, for the application, or for the client to read or to close; each has its
    timer, but for the application, which has limits of its own.

    Offers to speak another protocol are not heard. With one the parser would take the body for that protocol: the body
    is given to another parser, which knows its framing alone.
    """

    def __init__(self, *args: Any, door: Door | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._door = door or Door()
        self.address = ""
        self._asked, self.app = self.app, self._at_its_turn
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._problem: ApiError | None = None
        self._last_word: ApiError | None = None
        self._refused = False
        self._turned_out = False
        self._priming = False
        self._in_head = True
        self._begun = False
        self._unanswered = 0
        self._untold_bytes = 0
        self._head_bytes = 0

    def turn_out(self) -> None:
        self._turned_out = True
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client:
            self.address = origin(self.client[0])
        self._limit(HEAD_TIMEOUT_S, self._head_is_late)
        self._has_place = self._door.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit(None, self._close)
        if self._write_timer is not None:
            self._write_timer.cancel()
        if not self._turned_out:
            self._door.leave(self)
        super().connection_lost(exc)

    def _limit(self, seconds: float | None, then: Callable[[], object]) -> None:
        """The one timer of what a connection waits for; none while the application works."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._time_is_up, then)

    def _time_is_up(self, then: Callable[[], object]) -> None:
        """Perhaps of thousands at once: then it waits for its turn, and what comes until then counts."""
        timer = self._timer
        self._door.way_out.soon(lambda: then() if self._timer is timer else None, self.address)

    async def _at_its_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._door.turnstile.pass_through(self.address)
        await self._asked(scope, receive, send)

    # what comes in

    def data_received(self, data: bytes) -> None:
        """The first bytes of a request wait at the turnstile, and nothing more is read meanwhile."""
        if self._begun or self._unanswered or self._door.turnstile.passes():
            self._take(data)
        else:
            self.transport.pause_reading()
            self._door.turnstile.wait(partial(self._take_late, data), self.address)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True: the connection stays until its turn to close. One under TLS closes at once in any case."""
        if self.scheme == "https" or self._door.way_out.passes():
            return False
        self._door.way_out.wait(self.transport.close, self.address)
        return True

    def _take_late(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self._take(data)

    def _take(self, data: bytes) -> None:
        """The parser tells of a header when it is whole; what it has taken in and not told is counted here."""
        if self._refused:
            return
        if not self._begun and not self._unanswered:
            self._begun = True
            self._limit(HEAD_TIMEOUT_S, self._head_is_late)
        self._untold_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._problem or ApiError(400, "This is no valid HTTP request.", "bad_http"))
        if self._in_head and self._untold_bytes > MAX_HEAD_BYTES and not self._refused:
            self._refuse(_head_too_large())

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self._read_on()

    def _read_on(self) -> None:
        """Behind a head with an offer: as if it had not been made."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        framing = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self._priming = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        finally:
            self._priming = False

    def on_message_begin(self) -> None:
        if self._priming:
            return
        super().on_message_begin()
        self._head_bytes = 0
        self.scope["extensions"] = {"abort": self.transport.abort}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        if self._priming:
            return
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._priming:
            return
        super().on_header(name, value)
        self._count_head(len(name) + len(value))

    def _count_head(self, size: int) -> None:
        self._untold_bytes -= size
        self._head_bytes += size
        if len(self.headers) > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._stop_with(_head_too_large())

    def _stop_with(self, problem: ApiError) -> None:
        """From within the parser, which then stops."""
        self._problem = problem
        raise problem

    def on_headers_complete(self) -> None:
        if self._priming:
            return
        if self._unanswered > MAX_PIPELINED:
            self._stop_with(ApiError(400, f"More than {MAX_PIPELINED} requests wait behind one.", "too_many_requests"))
        if not self._has_place and self.url.partition(b"?")[0] != ALWAYS_SERVED.encode():
            self._stop_with(
                ApiError(503, "There are too many connections.", "too_many_connections", headers={"retry-after": "1"})
            )
        super().on_headers_complete()
        self._in_head = False
        self._unanswered += 1
        self._limit(None, self._close)
        self._door.work(self)

    def on_message_complete(self) -> None:
        """Behind an offer, the message is not complete: its body follows."""
        if self.parser.should_upgrade():
            return
        self._untold_bytes = 0
        self._in_head, self._begun = True, False
        super().on_message_complete()
        if not self._unanswered:
            self._rest()

    # what goes out

    def on_response_complete(self) -> None:
        """What to wait for next: the client to close, the application's next answer, the rest of a body, or a head."""
        self._unanswered -= 1
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            self._limit(CLOSE_S, self.transport.abort)
        elif self._unanswered:
            return
        elif self._last_word is not None:
            self._answer(self._last_word)
        elif not self._in_head:
            self._limit(LINGER_S, self._body_is_late)
        else:
            self._rest()

    def _rest(self) -> None:
        self._begun = self._untold_bytes > 0
        self._limit(HEAD_TIMEOUT_S if self._begun else KEEP_ALIVE_S, self._nothing_came)
        self._door.rest(self)

    def _body_is_late(self) -> None:
        """Of a request that was answered without it: for a moment it was read and dropped."""
        self._refused = True
        self._linger()

    def _nothing_came(self) -> None:
        self._head_is_late() if self._begun else self._close()

    def _head_is_late(self) -> None:
        self._refuse(ApiError(408, f"The head was not complete after {HEAD_TIMEOUT_S:g} s.", "head_timeout"))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(STUCK_WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _close(self) -> None:
        """Once all is sent; but not for ever if the client does not read."""
        self.transport.close()
        self._limit(CLOSE_S, self.transport.abort)

    def _refuse(self, error: ApiError) -> None:
        """Nothing more is read. Answers come in order: those to earlier requests first."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if not self._in_head:
            self._break_off()
        if self._unanswered:
            self._last_word = error
        elif not self.transport.is_closing():
            self._answer(error)

    def _break_off(self) -> None:
        """The request whose body is wrong: its application hears that the client is gone."""
        if self.cycle.response_complete:
            return
        if self.cycle.response_started:
            self._close()
        self.pipeline = type(self.pipeline)(entry for entry in self.pipeline if entry[0] is not self.cycle)
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self._unanswered -= 1

    def _answer(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body)
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in (headers | dict(error.headers or {})).items())
        self.transport.write(STATUS_LINE[error.status_code] + head.encode() + b"\r\n" + body)
        self._linger()

    def _linger(self) -> None:
        """Closing at once would cost a client that still sends the answer: for a moment, what it sends is dropped."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._limit(LINGER_S, self._close)
        else:
            self._close()


def _head_too_large() -> ApiError:
    return ApiError(431, f"The head has more than {MAX_HEADERS} headers or {MAX_HEAD_BYTES} bytes.", "head_too_large")


def protocol(door: Door) -> dict[str, Any]:
    """For `uvicorn.Config`."""
    return {"http": partial(BoundedHttp, door=door), "ws": "none", "lifespan": "off"}
