"""Finding: what a check has to say."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Level = Literal["error", "warning", "note", "ok"]
"""An error: it cannot work, or its results cannot be trusted. A warning: slower or frailer than it should be."""


class Finding(Struct, frozen=True):
    """One judgement. `code` names the check for programs; `fix` is empty where there is nothing to do."""

    level: Level
    code: str
    title: str
    found: str
    why: str = ""
    fix: str = ""
