"""Single fields of a `config.json`, each checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.errors import ModelError

Config = Mapping[str, Any]

_MOST_LAYERS = 10_000

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


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
    if name not in _DTYPES:
        raise ModelError("bad_dtype", f"The configuration says dtype {name!r}.", f"Known: {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
