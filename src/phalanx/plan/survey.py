"""Wider questions than one plan: speed a GPU against speed a user, and what else a machine would hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.models import catalog
from phalanx.plan.candidates import Candidate
from phalanx.plan.choose import choose, default_formats
from phalanx.plan.engines import GIB, EngineTraits
from phalanx.plan.fit import Fit, fit
from phalanx.plan.shapes import MOST_RANKS, shape
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SMALLER_FORMATS = ("fp8", "awq")


@dataclass(frozen=True)
class Point:
    """A TP degree under one concurrency. On the front, no other point is faster both a GPU and a user."""

    tp: int
    replicas: int
    concurrency: int
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    ttft_ms: float
    on_front: bool = False


def pareto(
    spec: ModelSpec,
    machine: Machine,
    workload: Workload,
    engine: EngineTraits,
    weight_format: str,
    kv_format: str,
    tps: Sequence[int],
) -> list[Point]:
    """Output tokens a second and GPU against those a user sees once an answer runs, by TP degree and concurrency."""
    points = []
    for concurrency in CONCURRENCIES:
        load = dataclasses.replace(workload, concurrency=concurrency, requests=None)
        plan = choose(spec, "", machine, load, engines=[engine], formats=[weight_format], kv_format=kv_format, tps=tps)
        points += [_point(each, concurrency) for each in plan.candidates if each.prediction.tpot.mid > 0]
    best = {(point.tp, point.concurrency) for point in _front(points)}
    marked = [dataclasses.replace(point, on_front=(point.tp, point.concurrency) in best) for point in points]
    return sorted(marked, key=lambda point: (point.tp, point.concurrency))


def _point(candidate: Candidate, concurrency: int) -> Point:
    prediction = candidate.prediction
    return Point(
        candidate.tp,
        candidate.replicas,
        concurrency,
        candidate.per_gpu,
        1 / prediction.tpot.mid,
        prediction.ttft.mid * 1e3,
    )


def _front(points: Sequence[Point]) -> Iterator[Point]:
    most = 0.0
    for point in sorted(points, key=lambda each: (-each.tokens_per_s_per_user, -each.tokens_per_s_per_gpu)):
        if point.tokens_per_s_per_gpu > most:
            most = point.tokens_per_s_per_gpu
            yield point


def survey(machine: Machine, engine: EngineTraits, kv_format: str, context: int) -> list[dict[str, Any]]:
    """Every model of the catalog: the formats in which this machine holds it, or what it lacks."""
    return [_surveyed(entry, machine, engine, kv_format, context) for entry in catalog.entries().values()]


def _surveyed(
    entry: catalog.Entry, machine: Machine, engine: EngineTraits, kv_format: str, context: int
) -> dict[str, Any]:
    spec = entry.spec
    ways: list[dict[str, Any]] = []
    lacks: list[str] = []
    for weight_format in _formats(spec):
        way = _way(spec, machine, engine, weight_format, kv_format, context)
        if isinstance(way, str):
            lacks.append(way)
        else:
            ways.append(way)
    return {
        "model": entry.name,
        "parameters": spec.parameters,
        "active_parameters": spec.active_parameters,
        "max_positions": spec.max_positions,
        "ways": ways,
        "why_not": None if ways else lacks[-1],
    }


def _formats(spec: ModelSpec) -> tuple[str, ...]:
    return default_formats(spec) + SMALLER_FORMATS[1:] if spec.quantization is None else default_formats(spec)


def _way(
    spec: ModelSpec, machine: Machine, engine: EngineTraits, weight_format: str, kv_format: str, context: int
) -> dict[str, Any] | str:
    """The fewest GPUs that hold it in this format, and its room on as many as can share it; or why there are none."""
    refused = engine.refusal(spec, weight_format, kv_format) or engine.refuses_card(machine, weight_format)
    if refused is not None:
        return refused
    if context > spec.max_positions:
        return f"It was made for {spec.max_positions:,} tokens, fewer than the {context:,} of a request."
    formatted = spec.in_format(weight_format)
    legal = [tp for tp in range(1, min(len(machine), MOST_RANKS) + 1) if shape(formatted, tp, engine).is_legal]
    if not legal:
        return f"{engine.title} cannot split it over {len(machine)} GPUs in {weight_format}."

    def on(tp: int) -> Fit:
        return fit(spec, machine, tp, engine, weight_format=weight_format, kv_format=kv_format, context=context)

    widest = on(legal[-1])
    if not widest.fits:
        return _shortage(widest, context)
    fewest = next((tp for tp in legal[:-1] if on(tp).fits), legal[-1])
    return {
        "format": weight_format,
        "tp": fewest,
        "widest_tp": legal[-1],
        "weights_gib_per_gpu": widest.tightest.weight_bytes / GIB,
        "kv_tokens": widest.kv_tokens,
        "longest_context": widest.longest_context,
        "max_sequences": widest.max_sequences,
        "max_tokens_per_s_per_user": machine.smallest.bandwidth / _read_for_a_token(spec, weight_format, fewest),
    }


def _read_for_a_token(spec: ModelSpec, weight_format: str, tp: int) -> float:
    """Bytes of weights that a rank reads: over the bandwidth, the data sheet's limit of a user's speed."""
    return spec.weight_bytes(weight_format) * spec.active_parameters / spec.parameters / tp


def _shortage(widest: Fit, context: int) -> str:
    tight = widest.tightest
    if tight.kv_bytes <= 0:
        return (
            f"{-tight.kv_bytes / GIB:,.1f} GiB short on each of {widest.layout.tp} GPUs in {widest.weight_format}: "
            f"{tight.weight_bytes / GIB:,.1f} GiB of weights."
        )
    return f"Room for {widest.kv_tokens:,} tokens of KV in {widest.weight_format}; a request reaches {context:,}."
