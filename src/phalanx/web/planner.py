"""The planner over HTTP: what it knows, a plan, the pareto of speeds, and the models that a machine holds."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from phalanx.server.errors import ApiError
from phalanx.server.fairness import Turns
from phalanx.server.incoming import client_of
from phalanx.web.planner_lane import PlannerLane

_MOST_WAITING = 16
_MOST_TOKENS = 1_000_000
_MOST_CONCURRENCY = 4096

ShortName = Annotated[str, Field(min_length=1, max_length=200)]
Words = Annotated[str, Field(max_length=100, pattern=r"^[\w,:.\- ]*$")]
TokenCount = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]


class _ClosedBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PlanBody(_ClosedBody):
    """A question of `phalanx plan`, by the names of `plan.ask.PlanQuestion`. Models are those of the catalog: a page
    must not look into the server's folders, nor make it wait for another server."""

    model: ShortName
    machine: ShortName
    input_tokens: TokenCount = 1024
    output_tokens: TokenCount = 256
    concurrency: Annotated[int, Field(ge=1, le=_MOST_CONCURRENCY)] = 32
    slo: Words = ""
    engines: Words = ""
    tps: Words = ""
    formats: Words = ""
    kv_format: Words = "bf16"
    spread: Annotated[float, Field(ge=0, lt=1)] = 0.2
    electricity: Annotated[float, Field(ge=0, le=10)] = 0.12
    years: Annotated[float, Field(gt=0, le=50)] = 4.0
    context: TokenCount | None = None
    rate: Annotated[float, Field(gt=0, le=100_000)] | None = None
    shared_prefix: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] = 0
    agents: Annotated[int, Field(ge=1, le=10_000)] = 1
    network: Words = ""
    os: Words = "linux"


class ParetoBody(PlanBody):
    """One engine and one format; TP degrees to draw."""

    engines: Words
    formats: Words


class RecipeBody(PlanBody):
    """The plan whose files are wanted, and of which kind."""

    kind: Words


class FitsBody(_ClosedBody):
    """A machine, an engine, and the tokens that a request reaches."""

    machine: ShortName
    engines: Words = "phalanx"
    kv_format: Words = "bf16"
    context: TokenCount = 1280


def add_planner(router: APIRouter) -> None:
    """Routes of the planner. Two processes answer: plans at once, wider questions in their own time."""
    quick, slow = (_Desk(PlannerLane()) for _ in range(2))

    @router.get("/catalog")
    async def tell_catalog(request: Request) -> Response:
        return await quick.answer("catalog", {}, request)

    @router.post("/plan")
    async def plan(body: PlanBody, request: Request) -> Response:
        return await quick.answer("plan", body.model_dump(), request)

    @router.post("/pareto")
    async def pareto(body: ParetoBody, request: Request) -> Response:
        return await slow.answer("pareto", body.model_dump(), request)

    @router.post("/compare")
    async def compare(body: PlanBody, request: Request) -> Response:
        return await slow.answer("compare", body.model_dump(), request)

    @router.post("/ranking")
    async def ranking(body: PlanBody, request: Request) -> Response:
        return await slow.answer("ranking", body.model_dump(), request)

    @router.post("/recipe")
    async def recipe(body: RecipeBody, request: Request) -> Response:
        return await quick.answer("recipe", body.model_dump(), request)

    @router.post("/fits")
    async def fits(body: FitsBody, request: Request) -> Response:
        return await slow.answer("fits", body.model_dump(), request)


class _Desk:
    """Questions one at a time, keys in turn; those whose asker has left are not answered."""

    def __init__(self, lane: PlannerLane) -> None:
        self._lane = lane
        self._turns = Turns()
        self._waiting = 0

    async def answer(self, kind: str, question: dict[str, Any], request: Request) -> Response:
        if self._waiting >= _MOST_WAITING:
            raise ApiError(429, f"{_MOST_WAITING} questions are waiting already. Try again later.", "too_many_plans")
        self._waiting += 1
        try:
            async with self._turns.turn(client_of(request)):
                if await request.is_disconnected():
                    return Response(status_code=499)
                answered = await asyncio.to_thread(self._lane.ask, kind, question)
        finally:
            self._waiting -= 1
        if isinstance(answered, bytes):
            return Response(answered, media_type="application/json")
        raise _refused(answered)


def _refused(told: dict[str, Any]) -> ApiError:
    error = ApiError(400, f"{told['found']} {told['fix']}", told["code"], param=told["param"])
    error.body["error"] |= {"found": told["found"], "fix": told["fix"]}
    return error
