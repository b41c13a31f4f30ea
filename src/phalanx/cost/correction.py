"""What the cost model does not know: learned factors on its predictions, and how far off they still are.

A correction is the exponential of a sum of effects. Effects are shrunk towards zero, so a deployment that was never
measured is corrected by what it shares with measured ones: its engine family, its model, its GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import log2

from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

_LARGE_BATCH = 256
"""Requests at once from which a run is held by what the engine can hold, not by how many were sent."""


@dataclass(frozen=True)
class Traits:
    """What effects can be told apart by. `publisher`: who measured it; none for a deployment that is only planned.
    `attention_ranks`: so many have sequences of their own and share the experts.
    """

    family: str
    version: str
    model: str
    kind: str
    number_format: str
    gpu: str
    tp: int
    ep: int
    workload: Workload
    publisher: str = ""
    attention_ranks: int = 1


def traits_of(
    spec: ModelSpec,
    family: str,
    version: str,
    gpu: str,
    tp: int,
    ep: int,
    workload: Workload,
    publisher: str = "",
    attention_ranks: int = 1,
) -> Traits:
    experts = spec.moe.experts if spec.moe else 0
    kind = ("latent" if spec.latent else "moe") if experts else "dense"
    model = f"{spec.model_type}-{len(spec.layers)}x{spec.hidden}-{experts}"
    deployed = gpu, tp, ep, workload
    return Traits(family, version, model, kind, spec.number_format, *deployed, publisher, attention_ranks)


def effects(traits: Traits) -> Iterator[tuple[str, str, float]]:
    """(kind of effect, its name, how strongly it applies) for everything a deployment is corrected by."""
    family, load = traits.family, traits.workload
    engine = family.partition("-")[0]
    yield "card", traits.gpu, 1.0
    if traits.attention_ranks > 1:
        yield "apart", engine, 1.0
    if not leans(traits):
        yield from _whole_run_effects(traits, engine)
        return
    if traits.publisher:
        yield "publisher", f"{traits.publisher}/{family}", 1.0
    model = f"{family}/{traits.model}"
    version = f"{model}/{traits.version}/{traits.number_format}"
    yield "family", family, 1.0
    yield "kind", f"{family}/{traits.kind}/{traits.number_format}", 1.0
    yield "model", model, 1.0
    yield "version", version, 1.0
    yield "gpu", f"{model}/{traits.gpu}", 1.0
    yield "series", f"{version}/{traits.gpu}/{traits.tp}/{traits.ep}", 1.0
    for name, strength in _slopes(traits.tp, load):
        yield "slope", f"{family}/{name}", strength
        yield "model_slope", f"{model}/{name}", strength


def leans(traits: Traits) -> bool:
    """Whether corrections lean on lengths and clients: those of whole runs do not."""
    return traits.workload.total_requests > traits.workload.concurrency or traits.family == "phalanx"


def _whole_run_effects(traits: Traits, engine: str) -> Iterator[tuple[str, str, float]]:
    """All requests at once, and nothing after them. What closed loops taught does not carry over: their lengths and
    batches are others, and slopes drawn to 128 tokens in and 4,096 out fell below what the data sheet allows.
    """
    run = "offline" if traits.workload.concurrency > _LARGE_BATCH else "batch"
    if traits.publisher:
        yield "publisher", f"{traits.publisher}/{engine}/{run}", 1.0
    yield "regime", f"{engine}/{run}", 1.0
    yield "regime", f"{engine}/{run}/{traits.number_format}", 1.0
    yield "regime", f"{engine}/{run}/{traits.kind}", 1.0


_USUAL = {
    "tp": (1, 8, 1.5, 1.5),
    "concurrency": (4, 512, 5, 2),
    "input": (128, 8192, 11, 1.5),
    "output": (100, 8192, 9, 2),
}
"""Least and most that was measured, and the middle of it and how far one goes from there, as logarithms of 2."""


def _slopes(tp: int, load: Workload) -> Iterator[tuple[str, float]]:
    """How far TP and load are from the middle of what was measured, each and in pairs."""
    told = {"tp": tp, "concurrency": load.concurrency, "input": load.input_tokens, "output": load.output_tokens}
    far = {name: far_from_usual(name, value) for name, value in told.items()}
    yield from far.items()
    for one, other in combinations_with_replacement(far, 2):
        yield f"{one}*{other}", far[one] * far[other]


def far_from_usual(name: str, value: float) -> float:
    """Beyond the ends of what was measured, as at them."""
    least, most, middle, usual = _USUAL[name]
    return (log2(min(max(value, least), most)) - middle) / usual
