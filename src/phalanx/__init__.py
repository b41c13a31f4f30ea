"""Phalanx plans, serves and proves tensor-parallel LLM deployments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.engine.sampling import SamplingParams
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "PhalanxError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM needs torch, which the base install does not have: it is imported when first asked for."""
    if name != "LLM":
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    from phalanx.llm import LLM

    return LLM
