"""Server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def named_event(content: Mapping[str, Any]) -> bytes:
    """Named by its own type."""
    return b"event: " + str(content["type"]).encode() + b"\n" + event(content)
