"""What routes that take a body have in common: the body, whose it is, and whether the client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from phalanx.server.access_log import REQUEST_ID, request_id
from phalanx.server.errors import ApiError, bad_request, client_gone

CLIENT = "phalanx.client"
"""In a request's scope: who sent it, as far as keys tell. Empty where there are none."""

BODY_DONE = "phalanx.body_done"
"""In a request's scope: to be called when its body is held no longer."""

OPERATOR = "phalanx.operator"
"""In a request's scope: whether its client may do what concerns all others too."""

T = TypeVar("T")


def client_of(request: Request) -> str:
    return str(request.scope.get(CLIENT, ""))


def check_operator(request: Request) -> None:
    if not request.scope.get(OPERATOR, True):
        raise ApiError(
            403,
            "This concerns the clients of all keys: the key must be marked 'admin' in the file of --api-key-file.",
            "not_an_operator",
        )


def id_header(request: Request) -> dict[str, str]:
    """The request's id, as the answer's header."""
    return {"x-request-id": request.scope.get(REQUEST_ID) or request_id(request.headers.get("x-request-id", ""))}


async def json_body(request: Request) -> bytes:
    """The body as it came; what is in it is looked at elsewhere."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.startswith("application/") or not kind.endswith(("/json", "+json")):
        raise bad_request("The body must be a JSON object, sent as 'content-type: application/json'.", "bad_body")
    try:
        return b"".join([piece async for piece in request.stream()])
    except ClientDisconnect:
        raise client_gone() from None


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives. A client that leaves takes its work along."""
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise client_gone()
    finally:
        gone.cancel()
        working.cancel()
        request.scope.get(BODY_DONE, bool)()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
