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


def says(text: str) -> Script:
    return Script([{"content": part} for part in text.splitlines(keepends=True)])


@dataclass
class ScriptedServer:
    """Without a script it repeats the last message."""

    name: str = "scripted"
    scripts: deque[Script] = field(default_factory=deque)
    asked: list[dict[str, Any]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""

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

        return app

    async def _events(self, script: Script) -> AsyncIterator[str]:
        for index, delta in enumerate(script.deltas):
            logprobs = {"content": [script.logprobs[index]]} if script.logprobs else None
            yield _event({"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]})
        while script.waits and not self.go_on.is_set():
            await asyncio.sleep(0.01)
        if script.breaks_off:
            return
        if script.error:
            yield _event({"error": {"message": script.error, "code": "told"}})
            return
        yield _event({"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": script.finish}]})
        usage = {"prompt_tokens": 41, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 32}}
        yield _event({"choices": [], "usage": usage}) + "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


@contextmanager
def scripted_server(name: str = "scripted") -> Iterator[ScriptedServer]:
    """Runs in a thread of this process, on a free port."""
    served = ScriptedServer(name)
    config = uvicorn.Config(served.app(), port=0, log_level="warning", lifespan="off")
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
