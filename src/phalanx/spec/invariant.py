"""Answers that are the same bit for bit at every TP: which models allow it, and how their sums are cut.

Every sum over an inner dimension that ranks share is made of units, the same ones at every TP, whose sums are added up
as one balanced tree. A rank has whole branches of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from types import MappingProxyType

from phalanx.errors import ConfigError, LayoutError
from phalanx.spec.attention import Gqa
from phalanx.spec.ffn import SILU, Dense, Moe
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

MOST_UNITS = 8
_NOTHING: Mapping[str, int] = MappingProxyType({})


def inner_units(spec: ModelSpec, together: Mapping[str, int] = _NOTHING) -> int:
    """The most units, up to 8, that whole heads and whole columns of all FFNs can be cut into: a power of two.

    Of some matrices so many columns stay `together`, as those that share a scale do: a unit has a multiple of them.
    """
    units = gcd(MOST_UNITS, spec.heads, *_columns(spec))
    while units > 1 and any(spec.tensors[name].shape[1] % (units * count) for name, count in together.items()):
        units //= 2
    return units


def _columns(spec: ModelSpec) -> list[int]:
    """The inner dimensions of its FFNs."""
    sizes = (spec.intermediate, *((spec.moe.intermediate, spec.moe.shared) if spec.moe else ()))
    return [size for size in sizes if size]


def invariant_layout(spec: ModelSpec, tp: int, together: Mapping[str, int] = _NOTHING) -> Layout:
    """How the model is dealt. Refused where its parts or its sizes do not allow it, with what does."""
    foreign = sorted({what for layer in spec.layers for what in _foreign(layer.mixer, layer.ffn)})
    foreign += ["several residual streams"] * (spec.hyper is not None)
    foreign += ["a scaled residual"] * (spec.residual_scale != 1.0)
    if foreign:
        raise ConfigError(
            "not_invariant",
            f"This model has {', '.join(foreign)}: sums of these are not in one order yet.",
            "Leave invariant out.",
        )
    units = inner_units(spec, together)
    allowed = [each for each in (1, 2, 4, 8) if each <= units and _is_even(spec, each, units)]
    if tp not in allowed:
        columns = " and ".join(map(str, _columns(spec)))
        kept = f", of which {max(together.values())} stay together as they are stored," if together else ""
        widened = "or dtype fp32, which widens all weights, " if together else ""
        raise LayoutError(
            "not_invariant",
            f"TP={tp}, but {spec.heads} query heads over {spec.kv_heads} KV heads and FFNs of "
            f"{columns} columns{kept} go into equal units at TP {', '.join(map(str, allowed))}.",
            f"Use one of these, {widened}or leave invariant out.",
        )
    return Layout(spec, tp, units)


def _foreign(mixer: object, ffn: object) -> list[str]:
    found = []
    if not isinstance(mixer, Gqa):
        found.append(f"{type(mixer).__name__} layers")
    elif mixer.head_norm == "whole":
        found.append("norms over all heads")
    if not isinstance(ffn, Dense | Moe):
        found.append(f"{type(ffn).__name__} layers")
    else:
        if ffn.activation != SILU:
            found.append("a gate other than SiLU")
        if isinstance(ffn, Moe) and (ffn.bias or ffn.router.weighs_input):
            found.append("experts that have biases or weigh their input")
    return found


def _is_even(spec: ModelSpec, tp: int, units: int) -> bool:
    share = spec.heads // tp
    try:
        shards = Layout(spec, tp, units).shards
    except LayoutError:
        return False
    return all(shard.query_heads == range(shard.rank * share, (shard.rank + 1) * share) for shard in shards)
