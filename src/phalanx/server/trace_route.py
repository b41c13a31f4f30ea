"""`POST /trace`: some steps of the engine, over all ranks, as a file for Perfetto."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from phalanx.doctor.live import findings_of, picture_of
from phalanx.engine.marks import MOST_STEPS, StepTraces
from phalanx.server.errors import ApiError, bad_request
from phalanx.server.incoming import check_operator, json_body, while_connected
from phalanx.server.supervisor import Supervisor
from phalanx.trace.perfetto import to_chrome
from phalanx.trace.summary import by_kind
from phalanx.trace.timeline import steps_of


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many steps, and how long to wait for them where there is little to do."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)] = 8
    seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 10.0


def add_trace_route(router: APIRouter, supervisor: Supervisor) -> None:
    """It costs those who are served a little: no part of the public description. Needs the key where there is one."""

    @router.post("/trace", include_in_schema=False)
    async def trace(request: Request) -> Response:
        check_operator(request)
        asked = _asked(await json_body(request))
        if supervisor.state != "ready":
            raise ApiError(503, f"The server is {supervisor.state}.", f"server_{supervisor.state}")
        traces = await while_connected(request, supervisor.client.trace(asked.steps, asked.seconds))
        if traces is None:
            raise ApiError(501, "This engine's ranks cannot be traced.", "not_traced")
        return Response(await asyncio.to_thread(_encoded, traces), media_type="application/json")


def _asked(body: bytes) -> TraceRequest:
    try:
        return msgspec.json.decode(body or b"{}", type=TraceRequest)
    except msgspec.DecodeError as error:
        raise bad_request(f"The body is not what a trace takes: {error}.") from error


def _encoded(traces: StepTraces) -> bytes:
    """With what the cockpit shows of it."""
    summaries = [{"kind": kind, **msgspec.to_builtins(found)} for kind, found in by_kind(steps_of(traces)).items()]
    return msgspec.json.encode(
        to_chrome(traces) | {"summaries": summaries, "findings": findings_of(picture_of(traces))}
    )
