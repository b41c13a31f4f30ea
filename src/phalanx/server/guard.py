"""Guard: what every HTTP request must pass before any of it is read: key, headers, size."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from hmac import compare_digest

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.server.errors import ApiError
from phalanx.web.pages import PAGES

OPEN_PATHS = frozenset({"/live", *PAGES})
BODY_TIMEOUT_S = 30.0


class Guard:
    """Wraps the application. Denies by default: where keys are set, all but /live and the cockpit's files need one."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], max_body: int) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in keys]
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            self._check_length(headers.get(b"content-length"))
        except ApiError as error:
            await refuse(error, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _check_key(self, path: str, authorization: bytes) -> None:
        if not self._keys or path in OPEN_PATHS:
            return
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        matches = [compare_digest(given, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            what = "No API key was given." if not authorization else "The API key is wrong."
            raise ApiError(
                401,
                f"{what} Send it as 'Authorization: Bearer KEY'.",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_length(self, announced: bytes | None) -> None:
        if announced is not None and announced.isdigit() and int(announced[:20]) > self._max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_body} bytes.", "body_too_large")

    def _bounded(self, receive: Receive) -> Receive:
        """Reading a body ends at its limit in bytes, and with a client that takes too long to send it."""
        seen, whole = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

        async def read() -> Message:
            nonlocal seen, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"The body was not complete after {BODY_TIMEOUT_S:g} s.", "body_timeout") from None
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > self._max_body:
                raise self._too_large()
            return message

        return read


def _digest(key: bytes) -> bytes:
    """Keys are compared by digest, so that not even their lengths show in the time it takes."""
    return hashlib.sha256(key).digest()


async def refuse(error: ApiError, send: Send) -> None:
    body = msgspec.json.encode(error.body)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"} | dict(
        error.headers or {}
    )
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status_code, "headers": raw})
    await send({"type": "http.response.body", "body": body})
