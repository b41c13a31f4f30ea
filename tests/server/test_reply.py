"""How an answer is sent: events or one body, errors as a status or as a last event, and clients that leave or do not
read."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.types import Message

from phalanx.server.answer import AnswerPiece
from phalanx.server.chunks import Chunks
from phalanx.server.errors import ApiError
from phalanx.server.mailbox import Mailbox
from phalanx.server.reply import Reply
from phalanx.server.turnstile import Turnstile
from tests import timeless


class Spoken:
    """An answer of these tokens, a piece each. Then it waits for more, if it is told to."""

    def __init__(self, *words: str, then_waits: bool = False) -> None:
        self.words, self.then_waits = words, then_waits
        self.mailbox = Mailbox()
        self.left = False

    async def pieces(self, engine: object) -> AsyncIterator[list[AnswerPiece]]:
        assert engine == "engine"
        try:
            for word in self.words:
                yield [AnswerPiece(0, word)]
            if self.then_waits:
                await self.mailbox.take()
        finally:
            self.left = True

    def usage(self) -> dict[str, object]:
        return {"completion_tokens": len(self.words)}


class Plain(Chunks):
    """The simplest format there is."""

    def __init__(self, include_usage: bool = False) -> None:
        super().__init__({}, "", include_usage)

    def choice(self, piece: AnswerPiece, answer: object) -> object:
        return piece.content

    def _chunk(self, choice: bytes, beside: dict[str, object]) -> bytes:
        return b"data: %b\n\n" % (choice or json.dumps(beside["usage"], separators=(",", ":")).encode())

    def body(self, pieces: list[AnswerPiece], answer: object) -> object:
        return "".join(piece.content for piece in pieces)


class Client:
    """Reads everything, unless it stops after some messages, or leaves once it has that many."""

    def __init__(self, stops_after: int | None = None, leaves_after: int | None = None) -> None:
        self.stops_after = stops_after
        self.leaves_after = leaves_after
        self.got: list[Message] = []
        self.aborted = False
        self._left = asyncio.Event()

    async def send(self, message: Message) -> None:
        if self.stops_after is not None and len(self.got) >= self.stops_after:
            await asyncio.sleep(600)
        self.got.append(message)
        if self.leaves_after is not None and len(self.got) >= self.leaves_after:
            self._left.set()

    async def receive(self) -> Message:
        if self.leaves_after == 0:
            return {"type": "http.disconnect"}
        await self._left.wait()
        return {"type": "http.disconnect"}

    def abort(self) -> None:
        self.aborted = True

    @property
    def status(self) -> int:
        return self.got[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.got[0]["headers"]}

    @property
    def body(self) -> str:
        return b"".join(message["body"] for message in self.got[1:]).decode()

    @property
    def events(self) -> list[str]:
        return [event.removeprefix("data: ") for event in self.body.split("\n\n")[:-1]]


def given() -> str:
    return "engine"


def exchange(
    answer: Spoken,
    client: Callable[[], Client] = Client,
    *,
    stream: bool = True,
    include_usage: bool = False,
    format: Any = None,
    engine: Callable[[], Any] = given,
) -> tuple[Client, ApiError | None]:
    """What the client got, and how the answer is said to have ended."""
    ends: list[ApiError | None] = []

    async def run() -> Client:
        to = client()
        told: Any = answer
        sent = Reply(
            told,
            engine,
            format or Plain(include_usage),
            (format or Plain(include_usage)) if stream else None,
            10.0,
            {"x-request-id": "mine"},
            lambda _, error: ends.append(error),
            Turnstile(),
        )
        async with asyncio.timeout(60):
            await sent({"extensions": {"abort": to.abort}}, to.receive, to.send)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "something goes on behind the answer"
        return to

    got = timeless.run(run())
    (end,) = ends
    return got, end


def test_a_stream_is_an_event_a_piece_then_the_usage_and_done() -> None:
    client, end = exchange(Spoken("a", "b"), include_usage=True)
    assert client.status == 200
    assert client.headers["content-type"].startswith("text/event-stream")
    assert client.headers["x-request-id"] == "mine"
    assert client.events == ['"a"', '"b"', '{"completion_tokens":2}', "[DONE]"]
    assert [message["more_body"] for message in client.got[1:]] == [True, True, False]
    assert end is None


def test_usage_comes_only_when_asked_for() -> None:
    assert exchange(Spoken("a"))[0].events == ['"a"', "[DONE]"]


def test_a_whole_answer_is_one_body_of_its_length() -> None:
    client, end = exchange(Spoken("a", "b"), stream=False)
    assert (client.status, client.body) == (200, '"ab"')
    assert client.headers["content-length"] == "4"
    assert client.headers["x-request-id"] == "mine"
    assert end is None


@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_taken_is_told_by_its_status_and_headers(stream: bool) -> None:
    full = ApiError(429, "Full.", "queue_full", headers={"retry-after": "1"})

    def refuse() -> None:
        raise full

    client, end = exchange(Spoken("a"), stream=stream, engine=refuse)
    assert client.status == 429
    assert client.headers["retry-after"] == "1"
    assert client.headers["x-request-id"] == "mine"
    assert json.loads(client.body) == full.body
    assert end is full


def test_an_error_after_the_first_event_is_the_last_event() -> None:
    answer = Spoken("a", then_waits=True)
    answer.mailbox.close(ApiError(500, "Dead.", "engine_died"))
    client, end = exchange(answer)
    assert client.status == 200
    assert client.events[0] == '"a"'
    assert json.loads(client.events[1])["error"]["code"] == "engine_died"
    assert client.events[2:] == ["[DONE]"]
    assert client.got[-1]["more_body"] is False
    assert end is not None


@pytest.mark.parametrize(("stream", "words"), [(True, ["a"]), (False, ["a"]), (True, [])])
def test_a_mistake_of_our_own_ends_an_answer_as_an_error_too(
    stream: bool, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Spoken):
        async def pieces(self, engine: object) -> AsyncIterator[list[AnswerPiece]]:
            for word in words:
                yield [AnswerPiece(0, word)]
            raise KeyError("oops")

    client, end = exchange(Broken(), stream=stream)
    assert end is not None
    assert end.body["error"]["code"] == "internal_error"
    told = client.events[-2] if stream and words else client.body
    assert json.loads(told) == end.body
    assert client.status == (200 if stream and words else 500)
    assert "oops" not in client.body
    assert "oops" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_takes_too_long_is_ended_and_left(stream: bool) -> None:
    answer = Spoken("a", then_waits=True)
    client, end = exchange(answer, stream=stream)
    assert end is not None
    assert end.body["error"]["code"] == "request_timeout"
    assert client.status == (200 if stream else 504)
    assert json.loads(client.events[-2] if stream else client.body) == end.body
    assert answer.left
    assert not client.aborted


@pytest.mark.parametrize(("stream", "stops_after"), [(True, 0), (True, 1), (True, 2), (False, 0), (False, 1)])
def test_a_client_that_does_not_read_is_cut_off_after_the_time_limit(stream: bool, stops_after: int) -> None:
    answer = Spoken("a", "b", "c")
    client, end = exchange(answer, lambda: Client(stops_after=stops_after), stream=stream)
    assert client.aborted
    assert end is not None
    assert answer.left


def test_a_client_that_does_not_take_its_error_is_cut_off() -> None:
    """The time limit is over by then: without one of its own, the last word would wait for ever."""
    client, end = exchange(Spoken("a", then_waits=True), lambda: Client(stops_after=2))
    assert client.aborted
    assert end is not None
    assert end.body["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("leaves_after", [0, 2], ids=["before the first event", "mid-stream"])
def test_a_client_that_leaves_ends_its_answer(leaves_after: int) -> None:
    answer = Spoken(*(["a"] if leaves_after else []), then_waits=True)
    _, end = exchange(answer, lambda: Client(leaves_after=leaves_after))
    assert end is not None
    assert end.body["error"]["code"] == "client_gone"
    assert answer.left


def test_nothing_of_a_client_that_left_is_kept() -> None:
    """An exception keeps the frames it passed, and they keep all that was in them."""

    async def leave() -> weakref.ref[Spoken]:
        answer = Spoken(then_waits=True)
        told: Any = answer
        to = Client(leaves_after=0)
        sent = Reply(told, given, Plain(), Plain(), 10, {}, lambda *_: None, Turnstile())  # type: ignore[arg-type]
        await sent({"extensions": {}}, to.receive, to.send)
        return weakref.ref(answer)

    left = asyncio.run(leave())
    gc.collect()
    assert left() is None
