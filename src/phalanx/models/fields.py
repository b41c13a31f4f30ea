"""Single fields of a `config.json`, each checked as it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.errors import ModelError
from phalanx.spec.formats import DTYPE_NAMES

Config = Mapping[str, Any]

_MOST_LAYERS = 10_000


class Fields(Mapping[str, Any]):
    """A configuration that knows which of its fields were asked for. A field of None is as good as left out."""

    def __init__(self, values: Config) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unread(self) -> list[str]:
        return [key for key in self._values if key not in self.read]


def count(config: Config, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise ModelError("bad_config", f"{name} is {value!r}.", "It must be a positive whole number.")
    if default is not None:
        return default
    raise ModelError("bad_config", f"The configuration has no {names[0]}.", "Is this a causal language model's config?")


def layer_count(config: Config) -> int:
    layers = count(config, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ModelError("bad_config", f"num_hidden_layers is {layers}.", f"It must be at most {_MOST_LAYERS}.")
    return layers


def whole(config: Config, name: str) -> int:
    """A count that may be zero or left out."""
    return count(config, name) if config.get(name) else 0


def number(config: Config, name: str, default: float, least: float = -math.inf) -> float:
    value = float(config.get(name, default))
    if not math.isfinite(value):
        raise ModelError("bad_config", f"{name} is {value}.", "It must be a number.")
    if value < least:
        raise ModelError("bad_config", f"{name} is {value}.", f"It must be at least {least}.")
    return value


def each_layer(config: Config, name: str) -> list[Any] | None:
    """A list with an entry for every layer, where the configuration has it."""
    found = config.get(name)
    if not found:
        return None
    if not isinstance(found, list) or len(found) < layer_count(config):
        raise ModelError(
            "bad_config", f"{name} is {str(found)[:60]!r}.", f"It must list all {layer_count(config)} layers."
        )
    return found


def dtype(config: Config) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPE_NAMES:
        raise ModelError("bad_dtype", f"The configuration says dtype {name!r}.", f"Known: {', '.join(DTYPE_NAMES)}.")
    return DTYPE_NAMES[name]


def token_ids(config: Config, name: str) -> tuple[int, ...]:
    """One or several; none where the field is left out."""
    told = config.get(name, [])
    ids = told if isinstance(told, list) else [told]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError("bad_config", f"{name} is {str(told)[:60]}.", "It must be a token's number or a list of them.")
    return tuple(ids)
