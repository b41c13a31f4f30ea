"""Adapters while the server runs: loaded and unloaded by operators, under vLLM's names."""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field, ValidationError

from phalanx.server.complaints import complaint_of
from phalanx.server.errors import ApiError, bad_request
from phalanx.server.fields import Body, Name, Text
from phalanx.server.incoming import check_operator, json_body, while_connected
from phalanx.server.service import Service

B = TypeVar("B", bound=Body)


AdapterName = Annotated[Name, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
"""As it stands in a line of the log."""


class LoadAdapterRequest(Body):
    lora_name: AdapterName
    lora_path: Annotated[Text, Field(min_length=1, max_length=4096)]


class UnloadAdapterRequest(Body):
    lora_name: Name


def adapter_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/load_lora_adapter", openapi_extra=_takes(LoadAdapterRequest))
    async def load(request: Request) -> PlainTextResponse:
        asked = await _read(LoadAdapterRequest, request, service)
        if asked.lora_name in service.names:
            raise bad_request(f"{asked.lora_name!r} is a name of the model itself.", param="lora_name")
        await while_connected(request, service.load_adapter(asked.lora_name, asked.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", openapi_extra=_takes(UnloadAdapterRequest))
    async def unload(request: Request) -> PlainTextResponse:
        asked = await _read(UnloadAdapterRequest, request, service)
        if asked.lora_name not in service.adapters:
            raise ApiError(404, f"There is no adapter {asked.lora_name!r}.", "unknown_adapter", param="lora_name")
        await while_connected(request, service.unload_adapter(asked.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    return router


async def _read(kind: type[B], request: Request, service: Service) -> B:
    """What is asked, by someone who may: adapters are files of this machine, and change what others are answered by."""
    check_operator(request)
    if not len(service.keys):
        raise ApiError(403, "Adapters are loaded and unloaded by key alone, and this server has none.", "no_key")
    try:
        return kind.model_validate_json(await json_body(request))
    except ValidationError as error:
        raise complaint_of(error) from None


def _takes(body: type[Body]) -> dict[str, object]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}
