"""HTTP as it comes over the wire: bounds of a head, and what is unusual but allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from phalanx.server import http
from phalanx.server.door import Door
from phalanx.server.http import BoundedHttp
from phalanx.server.turnstile import MOST_AT_ONCE
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


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Does not look at the body, as `/live`."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(10**6)


def talk(
    *parts: bytes,
    wait_s: float = 0.0,
    app: Callable[..., Any] = echo,
    can_end: bool = False,
    door: Door | None = None,
) -> Wire:
    """What the server writes to a client that sends these parts."""

    async def run() -> Wire:
        config = uvicorn.Config(app, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
        config.load()
        wire, server = Wire(), BoundedHttp(config, ServerState(), {}, door=door)
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


OFFER = post(b"/a", b"12345", b"Connection: Upgrade", b"Upgrade: h2c")
CHUNKED = b"POST /c HTTP/1.1\r\nhost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
CONVERSATIONS = {
    "an offer with a body, then another request": OFFER + post(b"/b", b"xyz"),
    "an offer without a body": b"GET /a HTTP/1.1\r\nConnection: upgrade\r\nUPGRADE: websocket\r\n\r\n"
    + post(b"/b", b""),
    "an offer with a chunked body": CHUNKED % b"Upgrade: h2c\r\nConnection: Upgrade\r\n" + post(b"/b", b"x"),
    "a body that looks like an offer": post(b"/a", b"1\r\nUpgrade: h2c\r\n\r\n2") + post(b"/b", b"x"),
    "a body that looks like a request": post(b"/a", OFFER) + CHUNKED % b"" + post(b"/b", OFFER),
    "a body behind an offer that looks like one": post(b"/a", OFFER, b"Connection: Upgrade", b"Upgrade: h2c") * 2,
    "line ends between requests": post(b"/a", b"x") + b"\r\n\r\n" + post(b"/b", b"y"),
    "a wrong request behind a good one": post(b"/a", b"x") + b"NONSENSE\r\n\r\n" + post(b"/b", b"y"),
    "a wrong chunk": CHUNKED.replace(b"2\r\nde", b"zz\r\nde") % b"" + post(b"/b", b"y"),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_what_is_said_does_not_depend_on_how_it_is_cut_into_packets(name: str) -> None:
    whole = CONVERSATIONS[name]
    meant = talk(whole, wait_s=1).written
    assert talk(*pieces(whole, 1), wait_s=1).written == meant
    for cut in range(1, len(whole)):
        assert talk(whole[:cut], whole[cut:], wait_s=1).written == meant, (whole[:cut], whole[cut:])


def test_offers_are_answered_as_if_they_had_not_been_made() -> None:
    wire = talk(CONVERSATIONS["an offer with a body, then another request"])
    assert [part.rpartition(b"\r\n")[2] for part in wire.written.split(b"HTTP/1.1 ")[1:]] == [b"/a 5", b"/b 3"]
    assert statuses(talk(CONVERSATIONS["an offer with a chunked body"])) == [200, 200]


@pytest.mark.parametrize("idle", [(b"\r\n",), (b"\r\n", b"\r\n", b"\r"), (b"G",)])
def test_a_connection_that_says_nothing_more_after_an_answer_is_not_kept(idle: tuple[bytes, ...]) -> None:
    wire = talk(post(b"/a", b""), *idle, wait_s=http.HEAD_TIMEOUT_S + 1)
    assert statuses(wire) == [200, 408]
    assert wire.closed


def test_a_body_that_is_announced_where_nobody_reads_it_does_not_keep_the_connection() -> None:
    for begun in (b"", b"12345"):
        wire = talk(post(b"/live", b"x" * 100)[:-100] + begun, app=hello, wait_s=1, can_end=True)
        assert statuses(wire) == [200]
        assert wire.ended
        wire = talk(post(b"/live", b"x" * 100)[:-100] + begun, app=hello, wait_s=http.LINGER_S + 1, can_end=True)
        assert wire.closed


def test_behind_a_body_that_nobody_read_the_connection_is_used_again() -> None:
    """A client that was answered early and sends the rest all the same does not find the connection ended."""
    head, body = post(b"/live", b"x" * 100)[:-100], b"x" * 100
    parts = (head, body[:50], body[50:], post(b"/live", b""))
    wire = talk(*parts, app=hello, can_end=True, wait_s=http.LINGER_S * 3)
    assert statuses(wire) == [200, 200]
    assert not wire.ended
    assert talk(*parts, app=hello, can_end=True, wait_s=http.KEEP_ALIVE_S + 1).closed


def test_a_connection_kept_open_ends_with_its_time() -> None:
    assert not talk(post(b"/a", b""), wait_s=http.KEEP_ALIVE_S - 1).closed
    assert talk(post(b"/a", b""), wait_s=http.KEEP_ALIVE_S + 1).closed


class Stuck(Wire):
    """A client that does not read: what is written stays, and the connection cannot be closed, only cut."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = False

    def abort(self) -> None:
        self.cut = True


@pytest.mark.parametrize("paused", [True, False])
def test_a_client_that_does_not_read_is_cut_off(paused: bool) -> None:
    async def run() -> Stuck:
        config = uvicorn.Config(echo, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
        config.load()
        wire, server = Stuck(), BoundedHttp(config, ServerState(), {})
        server.connection_made(wire)
        server.data_received(post(b"/a", b"", *([] if paused else [b"connection: close"])))
        if paused:
            server.pause_writing()
        await asyncio.sleep(http.STUCK_WRITE_S + 1)
        server.connection_lost(ConnectionError())
        return wire

    assert timeless.run(run()).cut


def test_an_error_waits_for_the_answers_to_earlier_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Thirty-seven bytes once made the server write into a connection that it had ended, and log a traceback."""
    small = b"GET / HTTP/1.1\r\n\r\n" * 2 + b"\x00"
    assert len(small) == 37
    wire = talk(small, app=hello, can_end=True, wait_s=http.LINGER_S + 1)
    assert statuses(wire) == [200, 200, 400]
    assert wire.closed
    assert not caplog.records


def test_only_so_many_requests_wait_behind_one() -> None:
    wire = talk(b"GET / HTTP/1.1\r\n\r\n" * 1000, app=hello, wait_s=1)
    assert statuses(wire) == [200] * (http.MAX_PIPELINED + 1) + [400]
    assert wire.closed


def test_with_all_places_taken_only_live_is_answered() -> None:
    def full() -> Door:
        door = Door(1)

        class Busy:
            address = ""

            def turn_out(self) -> None:
                raise AssertionError("it is at work")

        busy = Busy()
        assert door.enter(busy)
        door.work(busy)
        return door

    assert statuses(talk(b"GET /live HTTP/1.1\r\n\r\n", app=hello, door=full())) == [200]
    wire = talk(b"GET /v1/models HTTP/1.1\r\n\r\n", app=hello, door=full())
    assert statuses(wire) == [503]
    assert b"too_many_connections" in wire.written
    assert wire.closed


def test_a_newcomer_takes_the_place_of_an_idle_connection() -> None:
    async def run() -> list[bool]:
        config = uvicorn.Config(never, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
        config.load()
        door, wires = Door(2), [Wire() for _ in range(3)]
        servers = [BoundedHttp(config, ServerState(), {}, door=door) for _ in wires]
        for number, (server, wire) in enumerate(zip(servers, wires, strict=True)):
            server.connection_made(wire)
            if number == 0:
                server.data_received(post(b"/", b""))
        return [wire.closed for wire in wires]

    assert timeless.run(run()) == [False, True, False]


def test_of_many_who_leave_in_one_moment_few_close_in_a_turn_of_the_loop() -> None:
    class Leaving(Wire):
        """As a transport: what the protocol does not keep open closes, and the protocol hears of it."""

        def leave(self, server: BoundedHttp) -> None:
            self.server = server
            if not server.eof_received():
                self.close()

        def close(self) -> None:
            if not self.closed:
                self.closed = True
                self.server.connection_lost(None)

    async def run() -> list[int]:
        config = uvicorn.Config(echo, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
        config.load()
        door, by_turn = Door(), [0]
        crowd = [(Leaving(), BoundedHttp(config, ServerState(), {}, door=door)) for _ in range(200)]
        for wire, server in crowd:
            server.connection_made(wire)
        for wire, server in crowd:
            wire.leave(server)
        while sum(by_turn) < len(crowd):
            by_turn.append(sum(wire.closed for wire, _ in crowd) - sum(by_turn))
            await asyncio.sleep(0)
        assert not door._inside
        return by_turn

    assert max(timeless.run(run())) <= MOST_AT_ONCE


@pytest.mark.parametrize("pipelined", [1, 8])
def test_of_many_who_ask_in_one_moment_few_begin_in_a_turn_of_the_loop(pipelined: int) -> None:
    """Else the streams of others would stand still until all of them are answered."""
    begun = 0

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun
        begun += 1
        await hello(scope, receive, send)

    async def run() -> list[int]:
        nonlocal begun
        config = uvicorn.Config(counting, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
        config.load()
        door, by_turn = Door(), []
        crowd = [(Wire(), BoundedHttp(config, ServerState(), {}, door=door)) for _ in range(200)]
        for wire, server in crowd:
            server.connection_made(wire)
        for _, server in crowd:
            server.data_received(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * pipelined)
        while any(len(statuses(wire)) < pipelined for wire, _ in crowd):
            before = begun
            await asyncio.sleep(0)
            by_turn.append(begun - before)
        return by_turn

    by_turn = timeless.run(run())
    assert sum(by_turn) == 200 * pipelined
    assert max(by_turn) <= MOST_AT_ONCE


def test_of_many_whose_time_is_up_in_one_moment_few_are_told_in_a_turn_of_the_loop() -> None:
    """Who speaks or leaves before its turn is told nothing."""

    async def run() -> tuple[list[int], list[list[int]]]:
        config = uvicorn.Config(echo, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
        config.load()
        door, told = Door(), [0]
        crowd = [(Wire(), BoundedHttp(config, ServerState(), {}, door=door)) for _ in range(200)]
        for wire, server in crowd:
            server.connection_made(wire)
            server.data_received(b"GET /l")
        await asyncio.sleep(http.HEAD_TIMEOUT_S)
        crowd[150][1].data_received(b"ive HTTP/1.1\r\n\r\n")
        crowd[151][1].connection_lost(None)
        for _ in range(50):
            told.append(sum(bool(wire.written) for wire, _ in crowd))
            await asyncio.sleep(0)
        return told, [statuses(wire) for wire, _ in crowd]

    told, answers = timeless.run(run())
    assert max(after - before for before, after in pairwise(told)) <= 2 * MOST_AT_ONCE
    assert answers == [[200] if number == 150 else [] if number == 151 else [408] for number in range(200)]
