"""How the families write their thoughts and their calls of tools: by which parsers to read them."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.models.registry import families


class Parsers(NamedTuple):
    reasoning: str | None = None
    tools: str | None = None


def parsers_for(model_type: str, model_name: str) -> Parsers:
    """The parsers of a model, by its configuration's `model_type` and its name: what it was trained on comes first."""
    name = model_name.lower().replace("_", "-")
    if "deepseek-r1" in name:
        return Parsers("deepseek_r1")
    if "qwq" in name:
        return Parsers("deepseek_r1", "hermes")
    if "hermes" in name:
        return Parsers(None, "hermes")
    family = families().get(model_type)
    return Parsers(*family.parsers(name)) if family is not None else Parsers()
