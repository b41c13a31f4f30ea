"""The cockpit's files: built from `web/` by `make web`, shipped with the package, served with a strict policy."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import Response

from phalanx.server.guard import PAGE_PATHS

_FILES = (
    ("index.html", "text/html; charset=utf-8"),
    ("cockpit.js", "text/javascript"),
    ("cockpit.css", "text/css"),
    ("cockpit.svg", "image/svg+xml"),
)
PAGES = dict(zip(PAGE_PATHS, _FILES, strict=True))

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_pages(app: FastAPI) -> None:
    """Serve the cockpit at `/`."""
    for path in PAGES:
        app.add_api_route(path, _page, methods=["GET", "HEAD"], include_in_schema=False)


async def _page(request: Request) -> Response:
    name, media_type = PAGES[request.url.path]
    body, tag = _file(name)
    headers = _HEADERS | {"etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


@cache
def _file(name: str) -> tuple[bytes, str]:
    body = (files("phalanx.web") / "static" / name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'
