"""Phalanx plans, serves and proves tensor-parallel LLM deployments."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError
from phalanx.version import __version__

if TYPE_CHECKING:
    from phalanx.engine.sampling import SamplingParams
    from phalanx.llm import LLM

__all__ = ["LLM", "PhalanxError", "SamplingParams", "__version__"]

_HOMES = {"LLM": "phalanx.llm", "SamplingParams": "phalanx.engine.sampling"}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: LLM needs torch, which the base install does not have, and help must be quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
