"""The HTTP application: routes, and errors in OpenAI's shape."""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic.json_schema import models_json_schema

from phalanx.server.adapter_routes import adapter_routes
from phalanx.server.anthropic.wire import CountRequest, MessagesRequest
from phalanx.server.error_handlers import add_error_handlers
from phalanx.server.errors import response_not_found
from phalanx.server.fields import Body
from phalanx.server.incoming import client_of, id_header, json_body, while_connected
from phalanx.server.operator_routes import operator_routes, probes
from phalanx.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
)
from phalanx.server.reference import add_reference
from phalanx.server.responses.wire import ResponsesRequest
from phalanx.server.service import Service
from phalanx.version import __version__

_BODIES: tuple[type[Body], ...] = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessagesRequest,
    CountRequest,
    ResponsesRequest,
    EmbeddingsRequest,
)


class Cockpit(Protocol):
    """What is served beside the API, of which the API knows nothing: pages, and what goes on behind them."""

    def mount(self, app: FastAPI) -> None: ...

    async def run(self) -> None: ...


def create_app(service: Service, cockpit: Cockpit | None = None) -> FastAPI:
    app = FastAPI(title="Phalanx", version=__version__, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    _add_openai_routes(app, service)
    _add_agent_routes(app, service)
    app.include_router(probes(service))
    app.include_router(operator_routes(service))
    app.include_router(adapter_routes(service))
    if cockpit is not None:
        cockpit.mount(app)
    described = _with_own_errors(app.openapi())
    app.openapi = lambda: described  # type: ignore[method-assign]
    add_reference(app, described)
    return app


def _with_own_errors(schema: dict[str, Any]) -> dict[str, Any]:
    """The framework's description, with the bodies that are taken and the errors that are really sent."""
    member = {"type": ["string", "null"]}
    error = {"type": "object", "properties": dict.fromkeys(("message", "type", "param", "code"), member)}
    body = {"application/json": {"schema": {"type": "object", "properties": {"error": error}}}}
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = {"description": "The request cannot be served.", "content": body}
    _, bodies = models_json_schema(
        [(kind, "validation") for kind in _BODIES],
        ref_template="#/components/schemas/{model}",
    )
    schema["components"] = {"schemas": bodies["$defs"]}
    return schema


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        asked = service.chat(await json_body(request), client_of(request), id_header(request))
        return await while_connected(request, asked)

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        asked = service.complete(await json_body(request), client_of(request), id_header(request))
        return await while_connected(request, asked)

    @app.post("/v1/embeddings", openapi_extra=_takes(EmbeddingsRequest))
    async def embeddings(request: Request) -> Response:
        asked = service.embed(await json_body(request), client_of(request), id_header(request))
        return await while_connected(request, asked)

    created = int(time.time())

    def model(name: str) -> dict[str, Any]:
        started, is_adapter = service.supervisor.client.started, name in service.adapters
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "phalanx",
            "root": name if is_adapter else service.name,
            "parent": service.name if is_adapter else None,
            "max_model_len": started.max_model_len if started else None,
            "tools": None if service.tool_parser is None else "words" if service.tools_in_words else "template",
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in (*service.names, *service.adapters)]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model(name)

    @app.post("/tokenize", openapi_extra=_takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        asked = service.tokenize("tokenize", await json_body(request), client_of(request))
        found = await while_connected(request, asked)
        started = service.supervisor.client.started
        length = started.max_model_len if started else None
        words = {"token_strs": found.words} if found.words is not None else {}
        return _json({"count": len(found.tokens), "max_model_len": length, "tokens": found.tokens, **words})

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        asked = service.detokenize(await json_body(request), client_of(request))
        return _json({"prompt": await while_connected(request, asked)})


def _add_agent_routes(app: FastAPI, service: Service) -> None:
    """Anthropic's messages and OpenAI's responses."""

    @app.post("/v1/messages", openapi_extra=_takes(MessagesRequest))
    async def messages(request: Request) -> Response:
        asked = service.message(await json_body(request), client_of(request), id_header(request))
        return await while_connected(request, asked)

    @app.post("/v1/messages/count_tokens", openapi_extra=_takes(CountRequest))
    async def count_tokens(request: Request) -> Response:
        asked = service.tokenize("message_tokens", await json_body(request), client_of(request))
        return _json({"input_tokens": len((await while_connected(request, asked)).tokens)})

    @app.post("/v1/responses", openapi_extra=_takes(ResponsesRequest))
    async def responses(request: Request) -> Response:
        asked = service.respond(await json_body(request), client_of(request), id_header(request))
        return await while_connected(request, asked)

    @app.get("/v1/responses/{id}")
    async def kept_response(id: str, request: Request) -> Response:
        kept = await service.response(id, client_of(request))
        return Response(kept.response, media_type="application/json")

    @app.delete("/v1/responses/{id}")
    async def forget_response(id: str, request: Request) -> dict[str, Any]:
        if not await service.responses.delete(client_of(request), id):
            raise response_not_found(id)
        return {"id": id, "object": "response", "deleted": True}


def _takes(body: type[Body]) -> dict[str, Any]:
    """What the description of a route says of its body, which is read elsewhere."""
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
