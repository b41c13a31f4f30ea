"""One HTTP session with an OpenAI-compatible server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from phalanx.bench.serving.measure import RequestTrace
from phalanx.bench.serving.options import Options
from phalanx.bench.serving.stream import TraceWriter, error_message
from phalanx.errors import ConfigError

clock = time.perf_counter

_ASK_TIMEOUT = aiohttp.ClientTimeout(total=30)
_KEEP_ALIVE = 4.0  # uvicorn drops idle connections after 5 s: be first, or a request meets a closed one
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_PROMPT_FIELDS = {"completions": "prompt", "chat": "messages"}


@dataclass(frozen=True, slots=True)
class Query:
    """One request of a dataset."""

    prompt: msgspec.Raw
    """Token ids, text or messages, in JSON already: as Python integers a long prompt takes six times the memory."""
    prompt_tokens: int
    max_tokens: int
    agent: int | None = None
    """Requests of one agent are sent one after the other."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Client:
    """Asks a server; `connect` makes one. An answer's times and counts go into its trace, and so does its failure."""

    def __init__(self, session: aiohttp.ClientSession, options: Options, model: _Model) -> None:
        self.model = model.id
        self.max_model_len = model.max_model_len
        self._session = session
        self._options = options
        self._prompt_field = _PROMPT_FIELDS[options.endpoint]
        self._url = options.root + _PATHS[options.endpoint]
        self._timeout = aiohttp.ClientTimeout(total=options.timeout)
        self._encode = msgspec.json.Encoder().encode
        self._fields: dict[str, Any] = {
            "model": self.model,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if options.ignore_eos else {}),
        }

    async def ask(self, query: Query, trace: RequestTrace) -> None:
        """Send it now and read the answer to its end."""
        own = {self._prompt_field: query.prompt, "max_tokens": query.max_tokens}
        body = self._encode({**self._fields, **own, **self._options.extra_fields})
        trace.prompt_tokens = query.prompt_tokens
        trace.sent = clock()
        try:
            async with self._session.post(self._url, data=body, timeout=self._timeout) as response:
                if response.status == 200:
                    await _read(response, trace)
                else:
                    trace.error = f"HTTP {response.status}: {_said(await response.read()) or response.reason}"
        except TimeoutError:
            trace.error = f"no complete answer within {self._options.timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            trace.error = f"{type(error).__name__}: {error}"

    async def tokenize(self, text: str) -> list[int] | None:
        """The server's tokens of a text; None if it does not tell."""
        body = self._encode({"model": self.model, "prompt": text, "add_special_tokens": False})
        try:
            async with self._session.post(
                f"{self._options.root}/tokenize", data=body, timeout=_ASK_TIMEOUT
            ) as response:
                return msgspec.json.decode(await response.read(), type=_Tokens).tokens
        except (aiohttp.ClientError, OSError, msgspec.DecodeError):
            return None


@asynccontextmanager
async def connect(options: Options) -> AsyncIterator[Client]:
    """A client for as long as the block runs. A server that is not there, or refuses, is told at once."""
    headers = {"Content-Type": "application/json", **options.headers}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        yield Client(session, options, await _served_model(session, options))


async def _served_model(session: aiohttp.ClientSession, options: Options) -> _Model:
    url = f"{options.root}/v1/models"
    try:
        async with session.get(url, timeout=_ASK_TIMEOUT) as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, OSError) as error:
        found = f"{options.root} does not answer: {error or type(error).__name__}."
        raise ConfigError("server_unreachable", found, "Start the server, or name its address with --url.") from None
    if status in (401, 403):
        found = f"{url} answers HTTP {status}: {_said(body)}."
        raise ConfigError("server_refuses", found, "Give the server's key with --api-key-file.")
    try:
        served = msgspec.json.decode(body, type=_Models).data if status == 200 else []
    except msgspec.DecodeError:
        served = []
    named = [model for model in served if options.model in (None, model.id)]
    if named:
        return named[0]
    if options.model is not None:
        return _Model(options.model)
    raise ConfigError("no_model", f"{url} names no model (HTTP {status}).", "Name it with --model.")


async def _read(response: aiohttp.ClientResponse, trace: RequestTrace) -> None:
    answer = TraceWriter(trace)
    async for piece in response.content.iter_any():
        answer.feed(piece, clock())
        if trace.error is not None:
            return
    answer.close(clock())


def _said(body: bytes) -> str:
    """What an error's body says, in JSON or not."""
    try:
        return error_message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return error_message(body.decode(errors="replace"))
