"""How a `config.json` tells of rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from phalanx.errors import ModelError
from phalanx.models.fields import Config, count
from phalanx.spec.rope import Rope


def rope(config: Config, head_dim: int, theta: float = 10000.0, kind: str | None = None) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).

    `theta` is what the family means where nothing is said. `kind` chooses where parameters differ by kind of layer.
    """
    return read_rope(scaling_of(config, kind), config, head_dim, theta)


def scaling_of(config: Config, kind: str | None = None) -> dict[str, Any]:
    scaling: dict[str, Any] = {}
    for spelling in ("rope_scaling", "rope_parameters"):
        found = config.get(spelling, {})
        if kind is not None and isinstance(found, Mapping) and isinstance(found.get(kind), Mapping):
            found = found[kind]
        if not isinstance(found, Mapping):
            raise ModelError("bad_config", f"{spelling} is {found!r}.", "It must be an object.")
        scaling |= found
    return scaling


def read_rope(scaling: Mapping[str, Any], config: Config, head_dim: int, default_theta: float) -> Rope:
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or default_theta)
    kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
    whole = config.get("partial_rotary_factor")
    partial = float(scaling.get("partial_rotary_factor") or whole or 1.0)
    rotary_dim = int(head_dim * partial)
    if kind == "default":
        return Rope(theta, rotary_dim)
    if kind not in ("linear", "llama3", "yarn", "longrope"):
        raise ModelError(
            "unsupported_rope",
            f"The configuration asks for rope type {kind!r}.",
            "Phalanx runs default, linear, llama3, yarn and longrope.",
        )
    max_positions = count(config, "max_position_embeddings")
    if kind == "longrope":
        return _longrope(scaling, config, theta, rotary_dim, max_positions)
    if not isinstance(scaling.get("factor"), int | float):
        raise ModelError(
            "bad_config", f"rope type {kind!r} comes with factor {scaling.get('factor')!r}.", "It must be a number."
        )
    factor = float(scaling["factor"])
    return Rope(
        theta,
        rotary_dim,
        kind,
        factor=factor,
        original_max_positions=int(scaling.get("original_max_position_embeddings") or max_positions),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=bool(scaling.get("truncate", True)),
    )


def magnitude(factor: float, scale: float) -> float:
    """By how much YaRN sharpens attention."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(factor, scaling["mscale"]) / magnitude(factor, scaling["mscale_all_dim"])
    return magnitude(factor, 1.0)


def _longrope(scaling: Mapping[str, Any], config: Config, theta: float, rotary_dim: int, max_positions: int) -> Rope:
    """The factors of short contexts: the family's file keeps `max_positions` to those they are for."""
    name = "original_max_position_embeddings"
    original = int(scaling.get(name) or config.get(name) or max_positions)
    divisors = tuple(map(float, scaling.get("short_factor") or ()))
    if len(divisors) != rotary_dim // 2:
        raise ModelError(
            "bad_config",
            f"rope's short_factor has {len(divisors)} numbers, but {rotary_dim // 2} frequencies are rotated.",
            "Compare it with the model's own config.json.",
        )
    stretch = float(scaling.get("factor") or max_positions / original)
    told = scaling.get("attention_factor")
    sharper = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    factor = float(told) if told is not None else sharper
    return Rope(theta, rotary_dim, "longrope", attention_factor=factor, divisors=divisors)
