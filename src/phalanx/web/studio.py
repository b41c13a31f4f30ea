"""`phalanx studio`: the planner in the browser, without an engine and without torch."""

from __future__ import annotations

import signal
from collections.abc import Collection

import uvicorn
from fastapi import FastAPI

from phalanx.server.door import Door, room_for_connections
from phalanx.server.error_handlers import add_error_handlers
from phalanx.server.guard import MAX_COCKPIT_BODY, Guard
from phalanx.server.http import protocol
from phalanx.server.keys import KeyRing
from phalanx.server.listen import listen
from phalanx.web.cockpit import About, cockpit_routes
from phalanx.web.layout_routes import layout_routes
from phalanx.web.pages import add_pages

_LAST_ANSWERS_S = 5


def create_studio() -> FastAPI:
    app = FastAPI(title="Phalanx studio", docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    add_pages(app)
    app.include_router(cockpit_routes(About("studio")))
    app.include_router(layout_routes())
    return app


def guarded_studio(hosts: Collection[str]) -> Guard:
    """The studio behind the guard of `phalanx serve`: it has no key, and takes no large body."""
    return Guard(create_studio(), KeyRing(), max_body=MAX_COCKPIT_BODY, hosts=hosts)


def serve_studio(host: str, port: int, allowed_hosts: Collection[str] = ()) -> None:
    """Serve until told to stop."""
    with listen(host, port) as listener:
        address, number = listener.getsockname()[:2]
        print(f"Phalanx studio: http://{f'[{address}]' if ':' in address else address}:{number}/", flush=True)
        config = uvicorn.Config(
            guarded_studio({host, *allowed_hosts}),
            **protocol(Door(room_for_connections())),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
        )
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
        uvicorn.Server(config).run(sockets=[listener])
