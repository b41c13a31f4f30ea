"""`phalanx studio` for tests: questions have all the time they need on a busy machine, and one that was asked before is
answered as it was then."""

from __future__ import annotations

import json
from functools import wraps
from typing import Any

from phalanx.cli import app
from phalanx.web.planner_lane import PlannerLane


def main() -> None:
    ask = PlannerLane.ask
    known: dict[str, bytes | dict[str, Any]] = {}

    @wraps(ask)
    def remembering(lane: PlannerLane, kind: str, question: dict[str, Any]) -> bytes | dict[str, Any]:
        asked = json.dumps([kind, question])
        if asked not in known:
            known[asked] = ask(lane, kind, question)
        return known[asked]

    PlannerLane.__init__.__defaults__ = (600.0,)
    PlannerLane.ask = remembering  # type: ignore[method-assign]
    app()


if __name__ == "__main__":
    main()
