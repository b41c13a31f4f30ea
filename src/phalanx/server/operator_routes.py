"""What operators and their machinery ask: probes, metrics, what is served and how."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from phalanx.server.error_handlers import add_error_handlers
from phalanx.server.incoming import check_operator
from phalanx.server.service import Service
from phalanx.server.supervisor import condition
from phalanx.server.trace_route import add_trace_route
from phalanx.version import __version__

_TOLD_OF_ENGINE = (
    *("tp", "dtype", "kv_cache_dtype", "state_dtype", "max_num_batched_tokens", "prefix_caching", "warm_up"),
    *("speculate", "speculate_tokens", "executor"),
)
"""Fields of the engine's configuration that clients may know: no paths, no addresses."""


def probes(service: Service) -> APIRouter:
    """What Kubernetes and Prometheus ask again and again."""
    router = APIRouter()
    supervisor = service.supervisor

    @router.get("/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @router.get("/ready")
    async def ready() -> Response:
        ranks = supervisor.client.ranks()
        state: dict[str, Any] = {"status": condition(supervisor.state, ranks)}
        if any(rank.silent for rank in ranks) and supervisor.state == "ready":
            state["status"] = "stuck"
        loading = supervisor.client.loading
        if supervisor.state == "starting" and loading is not None:
            state["loaded"] = round(loading.done / max(loading.total, 1), 3)
        return JSONResponse(state, 200 if state["status"] == "ready" else 503)

    @router.get("/health")
    async def health() -> Response:
        client = supervisor.client
        ranks = client.ranks()
        status = condition(supervisor.state, ranks)
        body: dict[str, Any] = {
            "status": status,
            "requests": client.live,
            "ranks": [vars(rank) for rank in ranks],
        }
        if client.hang is not None:
            body["hang"] = msgspec.to_builtins(client.hang) | {"fix": client.hang.fix}
        if supervisor.last_death is not None:
            body["last_death"] = supervisor.last_death.to_dict()
        if client.started is not None:
            free = client.books.free_blocks if client.books else client.started.num_blocks
            body["kv_blocks"] = {"total": client.started.num_blocks, "free": free}
        return JSONResponse(body, 200 if status in ("ready", "draining") else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.expose(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return router


def create_admin_app(service: Service) -> FastAPI:
    """Probes and metrics alone, for a port of their own."""
    app = FastAPI(title="Phalanx", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    app.include_router(probes(service))
    return app


def operator_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        client, config = service.supervisor.client, service.supervisor.launch.config
        started = client.started
        return {
            "version": __version__,
            "models": service.names,
            "model_type": service.spec.model_type,
            "reasoning_parser": service.reasoning_parser,
            "tool_call_parser": service.tool_parser,
            "engine": {name: getattr(config, name) for name in _TOLD_OF_ENGINE},
            "started": msgspec.to_builtins(started) if started is not None else None,
        }

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return service.tokenizer.info() | {"model_max_length": service.context}

    @router.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.supervisor.client.live}

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> dict[str, str]:
        check_operator(request)
        service.supervisor.admit(0).reset_prefixes()
        return {"status": "reset"}

    add_trace_route(router, service.supervisor)
    return router
