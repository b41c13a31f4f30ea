"""A server on loopback that answers as it is told to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

Step = bytes | float | Callable[[], bool] | None
"""Bytes to send, seconds to wait, what to wait for, or None to drop the connection."""


def frame(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return frame(choices=[{"index": 0, "text": piece, "finish_reason": finish}])


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return frame(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return frame(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion, **details})


DONE = b"data: [DONE]\n\n"


def plain_answer(body: dict[str, Any]) -> list[Step]:
    """One chunk a token, and the count of both sides."""
    prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"]).split()
    made = [text(" x", "length" if token == body["max_tokens"] - 1 else None) for token in range(body["max_tokens"])]
    return [*made, usage(len(prompt), body["max_tokens"]), DONE]


class FakeServer:
    """`answer` makes the steps of a streamed answer from the request's body, or an HTTP response."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], list[Step] | web.Response] = plain_answer
        self.models: Any = {"data": [{"id": "fake-model", "max_model_len": 4096}]}
        self.models_status = 200
        self.tokenize: Callable[[str], list[int]] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.url = ""

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()

        def serve() -> None:
            self._loop.run_until_complete(self._listen())
            started.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        assert started.wait(60)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models, status=self.models_status)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.tokenize is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        tokens = self.tokenize((await request.json())["prompt"])
        return web.json_response({"count": len(tokens), "tokens": tokens, "max_model_len": 4096})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        steps = self.answer(body)
        if isinstance(steps, web.Response):
            return steps
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for step in steps:
                if step is None:
                    assert request.transport is not None
                    request.transport.close()
                    return response
                if isinstance(step, bytes):
                    await response.write(step)
                else:
                    await (asyncio.sleep(step) if isinstance(step, float) else _until(step))
            await response.write_eof()
            return response
        finally:
            self.in_flight -= 1


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()
