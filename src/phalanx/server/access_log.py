"""The access log: one line a request, with what was learnt of it on its way."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("phalanx.request")

REQUEST_ID = "phalanx.request_id"
"""In a request's scope: the client's own id of its request, or a new one."""
_ASKED_ALL_THE_TIME = frozenset({"/live", "/ready", "/health", "/metrics", "/ping", "/load"})
_PAGES = ("/cockpit", "/docs")
_LONGEST_PATH = 200


@dataclass
class Access:
    """A request under way: `fields` go into its line."""

    id: str
    traceparent: str = ""
    fields: dict[str, object] = field(default_factory=dict)


_current: ContextVar[Access | None] = ContextVar("access", default=None)


def note(**fields: object) -> None:
    """Of the request that is being served."""
    access = _current.get()
    if access is not None:
        access.fields |= fields


def traceparent() -> str:
    """The trace that the request being served belongs to, as its client told it."""
    access = _current.get()
    return access.traceparent if access is not None else ""


def request_id(given: str) -> str:
    """The client's own, if it fits a line of a log, or a new one."""
    return given if re.fullmatch(r"[\w.\-]{1,128}", given, re.ASCII) else f"req-{uuid.uuid4().hex}"


class AccessLog:
    """Wraps all else. Every answer tells the request's id; probes and pages that go well leave no line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        id = scope[REQUEST_ID] = request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        access = Access(id, headers.get(b"traceparent", b"").decode("latin-1"))
        began, status = time.perf_counter(), 499

        def sending(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not any(name == b"x-request-id" for name, _ in message["headers"]):
                    message["headers"] = [*message["headers"], (b"x-request-id", id.encode())]
            return send(message)

        token = _current.set(access)
        try:
            await self._app(scope, receive, sending)
        finally:
            _current.reset(token)
            if status >= 400 or not _is_quiet(scope["path"]):
                _tell(scope, access, status, time.perf_counter() - began)


def _is_quiet(path: str) -> bool:
    return path in _ASKED_ALL_THE_TIME or path == "/" or path.startswith(_PAGES)


def _tell(scope: Scope, access: Access, status: int, seconds: float) -> None:
    """Text and JSON have the same fields. A path may hold anything: only what fits a line is told."""
    path = re.sub(r"[^\x21-\x7e]", "?", scope["path"][:_LONGEST_PATH])
    fields = {"status": status, "ms": round(seconds * 1e3, 1)} | access.fields
    words = " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())
    told = {"id": access.id, "method": scope["method"], "path": path} | fields
    log.info("%s %s %s %s", access.id, scope["method"], path, words, extra={"fields": told})
