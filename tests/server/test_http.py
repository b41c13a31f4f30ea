"""HTTP as it comes over the wire: bounds of a head, and what is unusual but allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from phalanx.server import http
from phalanx.server.http import BoundedHttp
from tests import timeless


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path and the length of the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    answer = f"{scope['path']} {len(body)}".encode()
    headers = [(b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


class Wire(asyncio.Transport):
    """The client's end of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.ended = False
        self.can_end = False

    def can_write_eof(self) -> bool:
        return self.can_end

    def write_eof(self) -> None:
        self.ended = True

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def talk(*parts: bytes, wait_s: float = 0.0, app: Callable[..., Any] = echo, can_end: bool = False) -> Wire:
    """What the server writes to a client that sends these parts."""

    async def run() -> Wire:
        config = uvicorn.Config(app, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
        config.load()
        wire, server = Wire(), BoundedHttp(config, ServerState(), {})
        wire.can_end = can_end
        server.connection_made(wire)
        for part in parts:
            if not wire.closed:
                server.data_received(part)
            for _ in range(5):
                await asyncio.sleep(0)
        await asyncio.sleep(wait_s)
        by_server = wire.closed
        server.connection_lost(None)
        wire.closed = by_server
        return wire

    return timeless.run(run())


def statuses(wire: Wire) -> list[int]:
    return [int(part[:3]) for part in wire.written.split(b"HTTP/1.1 ")[1:]]


def post(path: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path, b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


LARGE = b"GET /a HTTP/1.1\r\nhost: x\r\n" + b"x-large: %s\r\n" % (b"y" * 1000) * 60 + b"\r\n"


@pytest.mark.parametrize("size", [1000, 16384, 10**6])
def test_a_head_within_its_bounds_is_taken_however_it_is_cut(size: int) -> None:
    assert 60_000 < len(LARGE) < http.MAX_HEAD_BYTES
    assert statuses(talk(*pieces(LARGE, size))) == [200]


@pytest.mark.parametrize("size", [1000, 16384, 10**6])
@pytest.mark.parametrize(
    "head",
    [
        b"GET /a HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /a HTTP/1.1\r\n" + b"x: y\r\n" * 300 + b"\r\n",
        b"GET /a HTTP/1.1\r\n" + b"x: %s\r\n" % (b"y" * 1000) * 70 + b"\r\n",
    ],
    ids=["a long header", "a long path", "many headers", "many long headers"],
)
def test_a_head_beyond_its_bounds_is_refused_however_it_is_cut(head: bytes, size: int) -> None:
    wire = talk(*pieces(head, size))
    assert statuses(wire) == [431]
    assert wire.closed
    assert json.loads(wire.written.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"


@pytest.mark.parametrize("size", [1000, 10**6])
def test_a_head_that_never_ends_is_refused_before_it_does(size: int) -> None:
    wire = talk(*pieces(b"GET /a HTTP/1.1\r\nx: " + b"y" * 70_000, size))
    assert statuses(wire) == [431]


def test_every_request_of_a_connection_has_the_bounds_of_its_own() -> None:
    assert statuses(talk(*[LARGE] * 3)) == [200] * 3
    assert statuses(talk(post(b"/a", b"x" * 200_000) + b"GET /b HT", b"TP/1.1\r\n\r\n")) == [200, 200]
    assert statuses(talk(post(b"/a", b"x"), b"GET /b HTTP/1.1\r\nx: ", *[b"y" * 1000] * 70)) == [200, 431]


def test_a_body_is_no_part_of_the_head() -> None:
    assert statuses(talk(*pieces(post(b"/a", b"x" * 200_000), 10_000), b"\r\n", post(b"/b", b""))) == [200, 200]
    assert talk(*pieces(post(b"/a", b"x" * 200_000), 10_000)).written.endswith(b"/a 200000")


@pytest.mark.parametrize("offer", [b"Upgrade: h2c", b"upgrade: websocket", b"UPGRADE:h2c"])
def test_an_offer_to_speak_another_protocol_is_not_heard_and_the_body_is(offer: bytes) -> None:
    """Java's HTTP client and curl --http2 offer h2c with every request."""
    request = post(b"/a", b"12345", b"Connection: Upgrade, HTTP2-Settings", offer, b"HTTP2-Settings: AAMAAABk")
    wire = talk(request, request)
    assert statuses(wire) == [200, 200]
    assert wire.written.endswith(b"/a 5")


def test_a_body_that_looks_like_an_offer_is_left_alone() -> None:
    body = b"a\r\nupgrade: h2c\r\nb"
    assert talk(post(b"/a", body)).written.endswith(b"/a %d" % len(body))
    assert talk(post(b"/a", body)[:-10], body[-10:]).written.endswith(b"/a %d" % len(body))


@pytest.mark.parametrize("begun", [b"", b"GET /a HT"])
def test_a_head_that_is_late_is_refused(begun: bytes) -> None:
    wire = talk(*filter(None, [begun]), wait_s=http.HEAD_TIMEOUT_S + 1)
    assert statuses(wire) == [408]
    assert wire.closed


def test_a_connection_kept_open_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the time limit for that, which is longer than the one for a head here."""
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 1.0)
    wire = talk(post(b"/a", b""), wait_s=3)
    assert statuses(wire) == [200]
    assert not wire.closed
    assert statuses(talk(post(b"/a", b""), b"GET /b HT", wait_s=3)) == [200, 408]


def test_a_client_that_still_sends_can_read_why_it_is_refused() -> None:
    """The connection is ended on this side first, and closed a moment later; what comes meanwhile is dropped."""
    parts = (b"GET / HTTP/1.1\r\nx: ", *[b"y" * 50_000] * 4, b"\r\n\r\nGET / HTTP/1.1\r\n\r\n")
    wire = talk(*parts, can_end=True, wait_s=http.LINGER_S / 2)
    assert statuses(wire) == [431]
    assert wire.ended
    assert not wire.closed
    assert talk(*parts, can_end=True, wait_s=http.LINGER_S * 2).closed


def test_what_is_no_http_is_told_so_in_json() -> None:
    wire = talk(b"\x16\x03\x01\x02\x00\x01")
    assert statuses(wire) == [400]
    assert json.loads(wire.written.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_http"


def test_the_application_can_cut_the_connection() -> None:
    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope["extensions"]["abort"]()

    assert talk(post(b"/a", b""), app=cut).closed


def test_chunked_bodies_and_pipelined_requests_are_taken() -> None:
    chunked = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    wire = talk(chunked + post(b"/b", b"x"))
    assert statuses(wire) == [200, 200]
    assert b"/a 5" in wire.written
    assert wire.written.endswith(b"/b 1")
