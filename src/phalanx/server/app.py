"""The HTTP application: routes, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from phalanx import __version__
from phalanx.engine.core import check_request
from phalanx.engine.sampling import SamplingParams
from phalanx.server import chat
from phalanx.server.error_handlers import add_error_handlers
from phalanx.server.errors import bad_request
from phalanx.server.protocol import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from phalanx.server.service import Service
from phalanx.web.cockpit import About, cockpit_routes
from phalanx.web.layout import Served, layout_routes
from phalanx.web.live import Live, live_route
from phalanx.web.pages import add_pages

_MOST_NAMED = 16
_REFUSED = {
    "chat_template": "A chat template in a request would run on the server; it uses the model's own.",
    "suffix": "Text after the answer cannot be given; these models only continue a prompt.",
    "best_of": "Use n: all answers are returned.",
}


def create_app(service: Service, live: Live) -> FastAPI:
    app = FastAPI(title="Phalanx", version=__version__, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    _add_openai_routes(app, service)
    _add_operator_routes(app, service)
    add_pages(app)
    tp = service.supervisor.launch.config.tp
    app.include_router(cockpit_routes(About("serve", service.name, tp)))
    app.include_router(layout_routes(Served(service.name, service.spec, tp)))
    app.include_router(live_route(live))
    app.openapi_schema = _with_own_errors(app.openapi())
    return app


def _with_own_errors(schema: dict[str, Any]) -> dict[str, Any]:
    """The framework's description, with the errors that are really sent."""
    member = {"type": ["string", "null"]}
    error = {"type": "object", "properties": dict.fromkeys(("message", "type", "param", "code"), member)}
    body = {"application/json": {"schema": {"type": "object", "properties": {"error": error}}}}
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = {"description": "The request cannot be served.", "content": body}
    for name in ("HTTPValidationError", "ValidationError"):
        del schema["components"]["schemas"][name]
    return schema


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, _headers(body, request))

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, _headers(body, request))

    created = int(time.time())

    def model() -> dict[str, Any]:
        started = service.supervisor.client.started
        length = started.max_model_len if started else None
        return {
            "id": service.name,
            "object": "model",
            "created": created,
            "owned_by": "phalanx",
            "max_model_len": length,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model()

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        tokens = await asyncio.to_thread(_tokens_of, body, service)
        started = service.supervisor.client.started
        length = started.max_model_len if started else None
        return {"count": len(tokens), "max_model_len": length, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        started = service.supervisor.client.started
        if started is not None and body.tokens:
            check_request(body.tokens, SamplingParams(), started.vocab, len(body.tokens) + 1)
        return {"prompt": await asyncio.to_thread(service.tokenizer.decode, body.tokens, keep_special=True)}


def _tokens_of(body: TokenizeRequest, service: Service) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.")
    if body.messages is None:
        return service.tokenizer.encode(body.prompt or "", special_tokens=body.add_special_tokens)
    text = chat.render(service.tokenizer, body.messages)
    return service.tokenizer.encode(text, special_tokens=False)


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    supervisor = service.supervisor

    @app.get("/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/ready")
    async def ready() -> Response:
        state: dict[str, Any] = {"status": supervisor.state}
        loading = supervisor.client.loading
        if supervisor.state == "starting" and loading is not None:
            state["loaded"] = round(loading.done / max(loading.total, 1), 3)
        return JSONResponse(state, 200 if supervisor.state == "ready" else 503)

    @app.get("/health")
    async def health() -> Response:
        client = supervisor.client
        ranks = client.ranks()
        well = supervisor.state in ("ready", "draining") and not any(rank.stuck for rank in ranks)
        status = supervisor.state if well or supervisor.state not in ("ready", "draining") else "stuck"
        body: dict[str, Any] = {
            "status": status,
            "requests": client.live,
            "ranks": [vars(rank) for rank in ranks],
        }
        if supervisor.last_death is not None:
            body["last_death"] = supervisor.last_death.to_dict()
        if client.started is not None:
            free = client.books.free_blocks if client.books else client.started.num_blocks
            body["kv_blocks"] = {"total": client.started.num_blocks, "free": free}
        return JSONResponse(body, 200 if well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.expose(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _headers(body: Body, request: Request) -> dict[str, str]:
    """Of the answer: the client's own request id or a new one, and the fields it sent that mean nothing here."""
    for field, why in _REFUSED.items():
        if (body.model_extra or {}).get(field) is not None:
            raise bad_request(f"{field} is not accepted. {why}", param=field)
    given = request.headers.get("x-request-id", "")
    headers = {"x-request-id": given if re.fullmatch(r"[\w.\-]{1,128}", given, re.ASCII) else f"req-{uuid.uuid4().hex}"}
    unknown = list(body.unknown_fields())
    if unknown:
        names = [re.sub(r"[^\x21-\x7e]", "?", name[:64]) for name in unknown[:_MOST_NAMED]]
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        headers["x-phalanx-warning"] = f"unknown fields ignored: {', '.join(names)}{more}"
    return headers
