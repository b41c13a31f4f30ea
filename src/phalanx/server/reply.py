"""Reply: runs an answer while it is sent, as a stream of events or as one body."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from phalanx.server.answer import Answer, AnswerPiece
from phalanx.server.engine_client import EngineClient
from phalanx.server.errors import ApiError, client_gone
from phalanx.server.turnstile import Turnstile

log = logging.getLogger("phalanx.server")

LAST_WORD_S = 5.0


class Format(Protocol):
    """How an endpoint writes an answer."""

    def error(self, error: ApiError) -> object: ...

    def body(self, pieces: list[AnswerPiece], answer: Answer) -> object:
        """The whole answer, from all its pieces."""
        ...


class StreamFormat(Format, Protocol):
    """How an endpoint that streams writes one in pieces."""

    def events(self, piece: AnswerPiece, answer: Answer) -> bytes:
        """A piece as events of a stream."""
        ...

    def last_events(self, answer: Answer) -> bytes: ...

    def last_error(self, error: ApiError, answer: Answer) -> bytes:
        """The end of a stream that has begun and cannot go on."""
        ...


class Reply(Response):
    """Sends an answer, in pieces if there is a `stream`. `on_finish` hears how it ended: None for well, else the error.

    It runs in a task of its own, which a token wakes up without passing all that an HTTP request is wrapped in.
    """

    def __init__(
        self,
        answer: Answer,
        engine: Callable[[], EngineClient],
        format: Format,
        stream: StreamFormat | None,
        timeout_s: float,
        headers: dict[str, str],
        on_finish: Callable[[Answer, ApiError | None], None],
        late: Turnstile,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.answer = answer
        self._engine = engine
        self._format = format
        self._stream = stream
        self._timeout_s = timeout_s
        self._late = late
        self._own_headers = headers
        self._on_finish = on_finish
        self._begun = False
        self._writing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        watcher = asyncio.create_task(self._watch(receive))
        outcome: ApiError | None = None
        try:
            outcome = await asyncio.create_task(self._run())
            if outcome is not None and not await self._heard(outcome):
                scope["extensions"]["abort"]()
        finally:
            watcher.cancel()
            self._on_finish(self.answer, outcome)

    async def _run(self) -> ApiError | None:
        try:
            async with self._late.limit(asyncio.get_running_loop().time() + self._timeout_s):
                await (self._send_whole() if self._stream is None else self._send_stream(self._stream))
        except ApiError as error:
            return error
        except TimeoutError:
            return ApiError(504, f"The answer was not complete after {self._timeout_s:g} s.", "request_timeout")
        except Exception:
            log.exception("an answer could not be written")
            return ApiError(500, "The server made a mistake; its log has the details.", "internal_error")
        return None

    async def _heard(self, error: ApiError) -> bool:
        """Whether the client could be told: not if a write is stuck, for then it does not read."""
        if self._writing:
            return False
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self._tell(error)
        except TimeoutError:
            return False
        return True

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.answer.mailbox.close(client_gone())

    async def _send_stream(self, format: StreamFormat) -> None:
        async with aclosing(self.answer.pieces(self._engine())) as batches:
            async for pieces in batches:
                events = b"".join([format.events(piece, self.answer) for piece in pieces])
                if events:
                    await self._write(events)
        await self._write(format.last_events(self.answer), more=False)

    async def _send_whole(self) -> None:
        pieces: list[AnswerPiece] = []
        async with aclosing(self.answer.pieces(self._engine())) as batches:
            async for some in batches:
                pieces += some
        await self._send_json(200, self._format.body(pieces, self.answer), {})

    async def _tell(self, error: ApiError) -> None:
        """As a status where nothing has been sent yet, else as a last event."""
        if self._begun and self._stream is not None:
            await self._write(self._stream.last_error(error, self.answer), more=False)
        else:
            await self._send_json(error.status_code, self._format.error(error), dict(error.headers or {}))

    async def _write(self, body: bytes, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            await self._send_start(200, headers)
        await self._put({"type": "http.response.body", "body": body, "more_body": more})

    async def _send_json(self, status: int, content: object, headers: dict[str, str]) -> None:
        body = msgspec.json.encode(content)
        await self._send_start(status, {"content-type": "application/json", "content-length": str(len(body))} | headers)
        await self._put({"type": "http.response.body", "body": body})

    async def _send_start(self, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in (self._own_headers | headers).items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _put(self, message: Message) -> None:
        self._writing = True
        await self._send(message)
        self._writing = False
