"""How a `config.json` tells of rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from phalanx.errors import ModelError
from phalanx.spec.fields import Config
from phalanx.spec.model import Rope


def rope(config: Config, head_dim: int, max_positions: int) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    scaling: dict[str, Any] = {}
    for spelling in ("rope_scaling", "rope_parameters"):
        found = config.get(spelling, {})
        if not isinstance(found, Mapping):
            raise ModelError("bad_config", f"{spelling} is {found!r}.", "It must be an object.")
        scaling |= found
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
    partial = float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * partial)
    if kind == "default":
        return Rope(theta, rotary_dim)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(
            "unsupported_rope",
            f"The configuration asks for rope type {kind!r}.",
            "Phalanx runs default, linear, llama3 and yarn.",
        )
    if not isinstance(scaling.get("factor"), int | float):
        raise ModelError(
            "bad_config", f"rope type {kind!r} comes with factor {scaling.get('factor')!r}.", "It must be a number."
        )
    factor = float(scaling["factor"])
    original = int(scaling.get("original_max_position_embeddings") or max_positions)
    return Rope(
        theta,
        rotary_dim,
        kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)
