"""`phalanx studio`: the planner in the browser, without an engine and without torch."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from phalanx.server.error_handlers import add_error_handlers
from phalanx.server.listen import listen
from phalanx.web.cockpit import About, cockpit_routes
from phalanx.web.layout import layout_routes
from phalanx.web.pages import add_pages


def create_studio() -> FastAPI:
    app = FastAPI(title="Phalanx studio", docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    add_pages(app)
    app.include_router(cockpit_routes(About("studio")))
    app.include_router(layout_routes())
    return app


def serve_studio(host: str, port: int) -> None:
    """Serve until told to stop."""
    with listen(host, port) as listener:
        address, number = listener.getsockname()[:2]
        print(f"Phalanx studio: http://{f'[{address}]' if ':' in address else address}:{number}/", flush=True)
        config = uvicorn.Config(create_studio(), log_level="warning", access_log=False, server_header=False)
        uvicorn.Server(config).run(sockets=[listener])
