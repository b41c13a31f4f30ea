"""What the scripts of all clients share: the server they ask, and how checks are told."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ.get("PHALANX_URL", "http://127.0.0.1:8000")
BASE = f"{URL}/v1"
KEY = os.environ.get("PHALANX_KEY", "none")
MODEL = os.environ.get("PHALANX_MODEL", "SmolLM2-135M-Instruct")
QUESTION = "What is the capital of France? Answer in one word."
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}

_checks: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    _checks[function.__name__.replace("_", " ")] = function
    return function


def run() -> None:
    """Run all checks: a line of JSON each, with what went wrong or null."""
    loop = asyncio.new_event_loop()
    for name, function in _checks.items():
        try:
            outcome = function()
            if inspect.isawaitable(outcome):
                loop.run_until_complete(outcome)
            problem = None
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps({"check": name, "problem": problem}), flush=True)
    sys.stdout.flush()
