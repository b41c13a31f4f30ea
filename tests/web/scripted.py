"""An OpenAI server that says what it is told to, with the cockpit's own pages in front."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from playwright.sync_api import expect

from phalanx.models import catalog
from phalanx.server.error_handlers import add_error_handlers
from phalanx.server.guard import Guard
from phalanx.server.keys import KeyRing
from phalanx.web.cockpit import About, cockpit_routes
from phalanx.web.layout_routes import Served, layout_routes
from phalanx.web.pages import add_pages

expect.set_options(timeout=60_000)

HOSTILE_NAME = '<img src=x onerror="window.__pwned=1">'


@dataclass
class Script:
    """One answer: deltas in order, then usage and the end; or an error in their place, or after them."""

    deltas: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str = "stop"
    status: int = 200
    error: str = ""
    breaks_off: bool = False
    waits: bool = False
    pace_s: float = 0.0


def says(text: str) -> Script:
    return Script([{"content": part} for part in text.splitlines(keepends=True)])


@dataclass
class ScriptedServer:
    """Without a script it repeats the last message."""

    name: str = "scripted"
    scripts: deque[Script] = field(default_factory=deque)
    asked: list[dict[str, Any]] = field(default_factory=list)
    live: list[dict[str, Any]] = field(default_factory=list)
    """Events of the live view; a stream stays open after them."""
    live_asked: list[dict[str, str]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def reset(self) -> None:
        """As new, for the next test. Streams of the last one end."""
        self.go_on.set()
        self.go_on = threading.Event()
        self.scripts.clear()
        for told in (self.asked, self.live, self.live_asked):
            told.clear()

    def app(self) -> FastAPI:
        app = FastAPI()
        add_error_handlers(app)
        add_pages(app)
        app.include_router(cockpit_routes(About("serve", self.name, 2)))
        app.include_router(layout_routes(Served(self.name, catalog.model("SmolLM2-135M"), 2)))

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": self.name, "max_model_len": 4096}]}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            self.asked.append(body)
            script = self.scripts.popleft() if self.scripts else says(body["messages"][-1]["content"])
            if script.error and not script.deltas:
                return JSONResponse({"error": {"message": script.error, "code": "told"}}, script.status)
            return StreamingResponse(self._events(script), media_type="text/event-stream")

        @app.get("/cockpit/live")
        async def live(request: Request) -> Response:
            self.live_asked.append(dict(request.query_params))
            return StreamingResponse(self._live_events(), media_type="text/event-stream")

        return app

    async def _live_events(self) -> AsyncIterator[str]:
        go_on = self.go_on
        for event in self.live:
            yield _event(event)
        while not go_on.is_set():
            await asyncio.sleep(0.05)

    async def _events(self, script: Script) -> AsyncIterator[str]:
        go_on = self.go_on
        for index, delta in enumerate(script.deltas):
            await asyncio.sleep(script.pace_s)
            logprobs = {"content": [script.logprobs[index]]} if script.logprobs else None
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            yield _event({"choices": [choice], "usage": _usage(index + 1)})
        while script.waits and not go_on.is_set():
            await asyncio.sleep(0.01)
        if script.breaks_off:
            return
        if script.error:
            yield _event({"error": {"message": script.error, "code": "told"}})
            return
        yield _event({"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": script.finish}]})
        yield _event({"choices": [], "usage": _usage(7)}) + "data: [DONE]\n\n"


def _usage(output: int) -> dict[str, Any]:
    return {"prompt_tokens": 41, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": 32}}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


@contextmanager
def scripted_server(name: str = "scripted", keys: tuple[str, ...] = ()) -> Iterator[ScriptedServer]:
    """Runs in a thread of this process, on a free port, behind the server's own guard."""
    served = ScriptedServer(name)
    app = Guard(served.app(), KeyRing(keys), 2**20)
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    served.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    try:
        yield served
    finally:
        served.go_on.set()
        server.should_exit = True
        thread.join(30)
