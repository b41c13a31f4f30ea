"""What single kernels reach on a card. An engine's rates go over to other cards by it."""

from __future__ import annotations

from functools import cache
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from phalanx.cost.price import Rates
from phalanx.cost.work import RankWork
from phalanx.spec.formats import PLAIN
from phalanx.spec.machine import Gpu

KERNELS_FILE = Path(__file__).with_name("kernels.toml")
_FOUR_BITS = ("int4", "fp8", "bf16")
_LIKE = {"nvfp4": _FOUR_BITS, "mxfp4": _FOUR_BITS, "int4": ("fp8", "bf16"), "fp8": ("bf16",), "bf16": ()}
"""Where a card was not measured in a format: which others to take, first known first."""
_REFERENCE = "H200-SXM"
_SCALED_BY_ROW = "fp8-channel"
"""Products of experts with a scale a row or tensor reach as much of the peak as those in bf16 (0.54 for 0.49 on B200,
0.55 for 0.58 on L40S, 0.38 for 0.43 on RTX PRO 6000); what the file says of `fp8` is of scales by block.
"""
_SHOWN = 0.7
"""The power to which a kernel's gain or loss shows in steps: graphs, overlap and other engines' kernels blur it."""


class Kernels(msgspec.Struct, frozen=True):
    """A card's kernels; what depends on the weights' format is a table."""

    card: str
    architectures: list[str]
    linear_read: dict[str, float]
    linear_compute: dict[str, float]
    expert_read: dict[str, float]
    expert_compute: dict[str, float]
    expert_us: dict[str, float]
    routed_passes: float
    layer_us: float
    cache_read: float
    prompt_attention: float


class CardReach(NamedTuple):
    """What kernels reach on a card, of a model's formats, as shares of what they reach on an H200: products of experts
    there in bf16, since they have one rate for all formats, all else in the same format.
    """

    linear_bandwidth: Any
    linear_compute: Any
    expert_bandwidth: Any
    expert_compute: Any
    cache_bandwidth: Any
    prompt_attention: Any
    sparse_layer_us: Any
    routed_passes: Any
    layer_us: Any


def reach_of(gpu: Gpu, work: RankWork) -> CardReach:
    own, reference = (_reached(known, work) for known in (kernels_like(gpu), kernels_like(Gpu.named(_REFERENCE))))
    reference = reference._replace(expert_compute=kernels_like(Gpu.named(_REFERENCE)).expert_compute["bf16"])
    shares = (mine / its for mine, its in zip(own, reference, strict=True))
    return CardReach(*(share**_SHOWN for share in shares))


def _reached(known: Kernels, work: RankWork) -> CardReach:
    linear, expert = _family(work.linear_format), _family(work.expert_format)
    return CardReach(
        linear_bandwidth=_in_format(known.linear_read, linear),
        linear_compute=_in_format(known.linear_compute, linear),
        expert_bandwidth=_in_format(known.expert_read, expert),
        expert_compute=_in_format(known.expert_compute, "bf16" if work.expert_format == _SCALED_BY_ROW else expert),
        cache_bandwidth=known.cache_read,
        prompt_attention=known.prompt_attention,
        sparse_layer_us=_in_format(known.expert_us, expert),
        routed_passes=known.routed_passes,
        layer_us=known.layer_us,
    )


def at_reach(rates: Rates, reach: CardReach) -> Rates:
    """An engine's rates, which are those on an H200, on a card where kernels reach this much of it."""
    return rates._replace(**{name: getattr(rates, name) * share for name, share in reach._asdict().items()})


def kernels_like(gpu: Gpu) -> Kernels:
    """Those of the card whose bandwidth is nearest, of its own architecture where one was measured."""
    measured = _load()
    same = [known for known in measured if gpu.architecture in known.architectures]
    return min(same or measured, key=lambda known: abs(log(Gpu.named(known.card).bandwidth / gpu.bandwidth)))


@cache
def _load() -> tuple[Kernels, ...]:
    class File(msgspec.Struct):
        kernels: tuple[Kernels, ...]

    return msgspec.toml.decode(KERNELS_FILE.read_bytes(), type=File).kernels


def _family(number_format: str) -> str:
    """Formats that one kind of kernel multiplies."""
    if number_format in _LIKE:
        return number_format
    if number_format in PLAIN:
        return "bf16"
    return "fp8" if number_format.startswith("fp8") else "int4"


def _in_format(table: dict[str, float], number_format: str) -> float:
    return next(table[name] for name in (number_format, *_LIKE[number_format]) if name in table)
