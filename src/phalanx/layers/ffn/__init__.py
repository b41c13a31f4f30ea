"""What follows the mixer of a layer, one file a kind. Each says which record of the spec it is built from."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from phalanx.layers.place import Place
from phalanx.spec.layer import Ffn


@cache
def _kinds() -> dict[type, Any]:
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {module.RECORD: module.PART for module in modules}


def build_ffn(place: Place, record: Ffn, prefix: str) -> Any:
    return _kinds()[type(record)](place, record, prefix)
