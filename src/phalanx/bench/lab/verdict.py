"""The verdict: which TP for which use, each with the number that decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.bench.lab.point import LabPoint

_WORTH = 0.05
"""Twice the ranks have to gain more than this: less is noise, or not worth a GPU."""


def verdicts(points: Sequence[LabPoint], on_gpus: bool) -> dict[str, str]:
    """By use: chat wants the least time between tokens, long context the most room, offline work the most for a GPU.

    Ranks on CPUs share their cores: there the most is simply the most, and replicas would share them too.
    """
    offline = _offline(points) if on_gpus else _offline_on_cpus(points)
    return {"chat": _chat(points), "long context": _long_context(points), "offline": offline}


def _first_near_best(points: Sequence[LabPoint], value: Callable[[LabPoint], float]) -> LabPoint:
    """The fewest ranks whose value is not worth raising any more."""
    best = max(map(value, points))
    return next(point for point in points if value(point) >= best * (1 - _WORTH))


def _chat(points: Sequence[LabPoint]) -> str:
    chosen = _first_near_best(points, lambda point: 1 / point.tpot_ms)
    told = f"TP={chosen.tp}: {chosen.tpot_ms:.2f} ms a token, {chosen.ttft_alone_ms:.0f} ms to the first of one prompt"
    larger = [point for point in points if point.tp > chosen.tp]
    if larger:
        told += (
            f"; TP={larger[0].tp} has {larger[0].tpot_ms:.2f}, with {larger[0].decode_collectives:.0%} of a step in "
        )
        told += "collectives"
    return told + "."


def _long_context(points: Sequence[LabPoint]) -> str:
    chosen = _first_near_best(points, lambda point: point.longest_context)
    told = f"TP={chosen.tp}: {chosen.longest_context:,} tokens for each request of this batch"
    smaller = [point for point in points if point.tp < chosen.tp]
    if smaller:
        told += f"; TP={smaller[-1].tp} has room for {smaller[-1].longest_context:,}"
    elif len(points) > 1:
        told += ", and more ranks add none"
    return told + "."


def _offline(points: Sequence[LabPoint]) -> str:
    chosen = _first_near_best(points, lambda point: point.tok_s_per_gpu)
    told = f"TP={chosen.tp}: {chosen.tok_s_per_gpu:,.1f} tokens/s a GPU"
    if chosen.usd_per_million is not None:
        told += f", {chosen.usd_per_million:.2f} USD a million"
    last = points[-1]
    if last.tp != chosen.tp:
        replicas = last.tp // chosen.tp
        told += (
            f"; {replicas} replicas of it make {replicas * chosen.tok_s:,.0f} tokens/s on {replicas * chosen.tp} GPUs"
        )
        told += f", one of TP={last.tp} makes {last.tok_s:,.0f} ({last.efficiency:.0%} efficient)"
    return told + "."


def _offline_on_cpus(points: Sequence[LabPoint]) -> str:
    chosen = _first_near_best(points, lambda point: point.tok_s)
    others = (f"TP={point.tp} makes {point.tok_s:,.1f}" for point in points if point is not chosen)
    return "; ".join([f"TP={chosen.tp}: {chosen.tok_s:,.1f} tokens/s", *others]) + ", on the same cores."
