"""Guard: what every HTTP request must pass before any of it is read: host, key, size."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.server.access_log import note
from phalanx.server.errors import ApiError, body_for
from phalanx.server.fairness import Shares
from phalanx.server.incoming import BODY_DONE, CLIENT, OPERATOR
from phalanx.server.keys import Key, KeyRing
from phalanx.server.turnstile import Turnstile

PROBE_PATHS = ("/ready", "/health", "/metrics")
PAGE_PATHS = ("/", "/cockpit.js", "/cockpit.css", "/cockpit.svg")
"""The cockpit's files hold no secret: the page asks for the key."""
OPEN_PATHS = frozenset({"/live", "/docs", *PAGE_PATHS})
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
READ_HERE = ("/cockpit/", "/trace", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Bodies that this process reads itself: they are small."""
BODY_TIMEOUT_S = 30.0
MAX_COCKPIT_BODY = 16 * 1024
_BODIES_AT_ONCE = 16


class Guard:
    """Wraps the application. Where keys are set, all but /live, /docs and the cockpit's files need one.

    Without keys, requests must be meant for this server: a web page that has its own name point here is not heard.
    `open_paths` need no key either, and may be asked by any name.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        max_body: int,
        hosts: Collection[str] = (),
        open_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._keys = keys
        self._open = OPEN_PATHS.union(open_paths)
        self._any_host = {"/live", *open_paths}
        self._hosts = LOOPBACK_NAMES | {host.lower() for host in hosts}
        self._max_body = max_body
        self._bodies = Shares(_BODIES_AT_ONCE * max_body, shared=keys.several)
        self._late = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            key = self._key(scope, headers)
            scope[CLIENT] = key.client if key is not None else ""
            scope[OPERATOR] = not self._keys or (key is not None and self._keys.is_operator(key))
            if key is not None:
                note(key=key.name)
            small = scope["path"].startswith(READ_HERE)
            most = min(self._max_body, MAX_COCKPIT_BODY) if small else self._max_body
            _check_length(headers.get(b"content-length"), most)
        except ApiError as error:
            await refuse(error, scope["path"], send)
            return
        body = _Body(scope[CLIENT], receive, most, self._bodies, self._late)
        scope[BODY_DONE] = body.done
        try:
            await self._app(scope, body.read, send)
        finally:
            body.done()

    def _key(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Key | None:
        """Who asks, as far as keys tell. Anthropic's clients have a header of their own for them."""
        if not self._keys:
            self._check_host(scope)
            return None
        authorization = headers.get(b"authorization", b"")
        if not authorization and b"x-api-key" in headers:
            authorization = b"Bearer " + headers[b"x-api-key"]
        scheme, _, secret = authorization.partition(b" ")
        key = self._keys.find(secret.strip())
        if scheme.lower() == b"bearer" and key is not None:
            return key
        if scope["path"] in self._open:
            return None
        what = "No API key was given." if not authorization else "The API key is wrong."
        raise ApiError(
            401,
            f"{what} Send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'.",
            "invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    def _check_host(self, scope: Scope) -> None:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        here = (scope.get("server") or ("",))[0]
        if scope["path"] in self._any_host or (len(given) == 1 and _name(given[0]) in self._hosts | {here}):
            return
        raise ApiError(
            421,
            f"The host {', '.join(given)[:100]!r} is not this server's. "
            "Start it with --allowed-hosts to serve that name, or with a key.",
            "wrong_host",
        )


class _Body:
    """Reading it ends at its limit in bytes, with a client that takes too long, and where too much is held already."""

    def __init__(self, client: str, receive: Receive, most: int, shares: Shares, late: Turnstile) -> None:
        self._client = client
        self._receive = receive
        self._most = most
        self._shares = shares
        self._late = late
        self._seen = 0
        self._held = 0
        self._whole = False
        self._deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

    async def read(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with self._late.limit(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"The body was not complete after {BODY_TIMEOUT_S:g} s.", "body_timeout") from None
        size = len(message.get("body", b""))
        self._seen += size
        self._whole = not message.get("more_body", False)
        if self._seen > self._most:
            raise _too_large(self._most)
        if not self._shares.take(self._client, size):
            raise ApiError(429, "Too many requests are being read.", "server_busy", headers={"retry-after": "1"})
        self._held += size
        return message

    def done(self) -> None:
        """Nobody holds it any more."""
        held, self._held = self._held, 0
        if held:
            self._shares.give(self._client, held)


def _name(host: str) -> str:
    """Without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _check_length(announced: bytes | None, most: int) -> None:
    if announced is not None and announced.isdigit() and int(announced[:20]) > most:
        raise _too_large(most)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body is larger than {most} bytes.", "body_too_large")


async def refuse(error: ApiError, path: str, send: Send) -> None:
    note(reason=error.body["error"]["code"])
    body = msgspec.json.encode(body_for(path, error))
    headers = {"content-type": "application/json", "content-length": str(len(body))} | dict(error.headers or {})
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status_code, "headers": raw})
    await send({"type": "http.response.body", "body": body})
