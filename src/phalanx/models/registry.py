"""Which families there are: every module of this package that has FAMILIES is one's file."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

import phalanx.models
from phalanx.models.family import Family


@cache
def families() -> dict[str, Family]:
    """By model_type."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(phalanx.models.__path__):
        found |= getattr(import_module(f"phalanx.models.{module.name}"), "FAMILIES", {})
    return found


def served() -> list[str]:
    return [name for name, family in families().items() if family.planned_only is None]
