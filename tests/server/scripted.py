"""A server whose model says what a test tells it to, for SDKs that want a real port: no engine, no other process."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn

from phalanx.runtime.config import EngineConfig
from phalanx.server.app import create_app
from phalanx.server.engine_client import EngineLaunch
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.guard import Guard
from phalanx.server.keys import KeyRing
from phalanx.server.mailbox import Mailbox
from phalanx.server.messages import NewToken, Started
from phalanx.server.metrics import Metrics
from phalanx.server.places import Places
from phalanx.server.service import Service
from phalanx.text.tokenizer import Tokenizer
from tests.server.inline import InlinePreparer, default_model

END = 2
CONTEXT = 2048


class ScriptedEngine:
    """Says the next of its lines to each request, a token at a time, and keeps what it was asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.lines: deque[str] = deque()
        self.prompts: list[str] = []
        self.params: list[Any] = []
        self.started: Started | None = Started(49152, CONTEXT, 16, 512, 16, [END])
        self.loading = self.books = None
        self.live = 0

    def submit(
        self, prompt, params, mailbox: Mailbox, choice: int, salt=None, grammar=None, owner="", adapter=None
    ) -> int:  # type: ignore[no-untyped-def]
        self.prompts.append(self.tokenizer.decode(prompt, keep_special=True))
        self.params.append(params)
        tokens = [*self.tokenizer.encode(self.lines.popleft(), special_tokens=False), END]
        asyncio.get_running_loop().create_task(self._say(tokens, params.max_tokens, mailbox, choice))
        return len(self.prompts)

    async def _say(self, tokens: list[int], most: int | None, mailbox: Mailbox, choice: int) -> None:
        for index, token in enumerate(tokens[:most]):
            last = "stop" if token == END else "length" if index + 1 == most else None
            mailbox.put(choice, NewToken(0, token, last, 0, 0.0))
            await asyncio.sleep(0)

    def cancel(self, id: int) -> None: ...

    def ranks(self) -> list[Any]:
        return []


class ToldGrammars:
    """Compiles nothing, and remembers what it was asked to."""

    def __init__(self) -> None:
        self.asked: list[Constraint] = []

    async def compile(self, constraint: Constraint, client: str = "") -> bytes:
        self.asked.append(constraint)
        return b"T"


class Scripted:
    def __init__(self, keys: tuple[str, ...] = (), **service: Any) -> None:
        spec, tokenizer = default_model()
        self.engine = ScriptedEngine(tokenizer)
        self.grammars: Any = ToldGrammars()
        supervisor: Any = SimpleNamespace(
            state="ready",
            client=self.engine,
            admit=lambda choices: self.engine,
            launch=EngineLaunch(EngineConfig(), 10, "none"),
            last_death=None,
        )
        preparer: Any = InlinePreparer()
        given = {"reasoning_parser": None, "tool_parser": "hermes", "tools_in_words": True} | service
        self.service = Service(
            name="tiny",
            spec=spec,
            context=CONTEXT,
            tokenizer=tokenizer,
            supervisor=supervisor,
            metrics=Metrics("tiny", False),
            places=Places(supervisor, shared=False),
            preparer=preparer,
            grammars=self.grammars,
            request_timeout_s=60,
            **given,
        )
        asyncio.run(preparer.start(self.service.assignment))
        self.app = Guard(create_app(self.service), KeyRing(keys), max_body=2**20)
        self.url = ""

    def says(self, *lines: str) -> None:
        self.engine.lines.extend(lines)

    @property
    def last_prompt(self) -> str:
        return self.engine.prompts[-1]


@contextmanager
def scripted(keys: tuple[str, ...] = (), **service: Any) -> Iterator[Scripted]:
    place = Scripted(keys, **service)
    server = uvicorn.Server(uvicorn.Config(place.app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        place.url = f"http://127.0.0.1:{port}"
        yield place
    finally:
        server.should_exit = True
        thread.join()
