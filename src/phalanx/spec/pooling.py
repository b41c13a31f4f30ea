"""How a model's hidden states become the embedding of a text, as its own files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.errors import ConfigError

POOLINGS = ("mean", "last")
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


class Pooling(NamedTuple):
    """`kind` is "mean" or "last"; None for one that is not known here, which `found` names."""

    kind: str | None
    normalised: bool
    found: str = ""


USUAL = Pooling("last", normalised=True)


def pooling_of(folder: Path, asked: str | None = None) -> Pooling:
    """As asked, or as the model's files for sentence-transformers say; else the last token's state at length 1."""
    if asked is not None and asked not in POOLINGS:
        raise ConfigError("bad_option", f"pooling is {asked!r}.", f"Use one of {', '.join(POOLINGS)}.")
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list):
        return Pooling(asked or "last", normalised=True)
    normalised = any(str(module.get("type", "")).endswith("Normalize") for module in modules)
    if asked is not None:
        return Pooling(asked, normalised)
    paths = [module.get("path", "") for module in modules if str(module.get("type", "")).endswith("Pooling")]
    config = _read(folder / str(paths[0]) / "config.json") if paths else None
    if paths and not isinstance(config, dict):
        return Pooling(None, normalised, f"that of {paths[0]}/config.json, which is not there")
    known = config.items() if config else ()
    on = [name for name, value in known if value is True and "mode" in name]
    if not on:
        return Pooling("last", normalised)
    return Pooling(_MODES.get(on[0]) if len(on) == 1 else None, normalised, " and ".join(on))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
