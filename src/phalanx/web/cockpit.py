"""What the cockpit asks its server: who it is, and the planner."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from fastapi import APIRouter

from phalanx.version import __version__
from phalanx.web.planner import add_planner


@dataclass(frozen=True)
class About:
    """The server the page came from. In the studio there is no model."""

    mode: Literal["serve", "studio"]
    model: str | None = None
    tp: int | None = None


def cockpit_routes(about: About) -> APIRouter:
    """Routes under `/cockpit`; they need the key where keys are set."""
    router = APIRouter(prefix="/cockpit", include_in_schema=False)

    @router.get("/about")
    async def tell_about() -> dict[str, Any]:
        return asdict(about) | {"version": __version__}

    add_planner(router)
    return router
