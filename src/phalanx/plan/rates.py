"""Arrivals at a rate: how many replicas of what hold them, or what rate can be held instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from math import ceil

from phalanx.plan.candidates import Candidate, Excluded
from phalanx.plan.engines import EngineTraits
from phalanx.plan.search import Loaded, Search
from phalanx.plan.slo import Slo
from phalanx.plan.steady import SteadyWatch

_GLANCE = 2
"""Windows that suffice to rank."""
_LOOK = 36
"""The most windows of the winner."""
_ENOUGH = 4
_MOST_GLANCES = 12
_MOST_LOOKS = 3

Key = tuple[str, str, int, int, int, int]


def hold(
    search: Search, formats: Sequence[str], engines: Sequence[EngineTraits], degrees: Sequence[int], slo: Slo
) -> list[Candidate | Excluded]:
    """Of every engine, format and TP degree the fewest replicas that hold the rate and meet the SLO, those with the
    fewest GPUs first. Where none holds it, what each can hold.
    """
    rate = search.workload.rate or 0.0
    outcomes = list(search.load_all(formats, engines, degrees))
    loaded = [outcome for outcome in outcomes if isinstance(outcome, Loaded)]
    excluded = [outcome for outcome in outcomes if isinstance(outcome, Excluded)]
    full = [(each, each.capacity) for each in loaded]
    held = [fewest for each, most in full if most >= rate for fewest in _fewest(search, each, most)]
    if held:
        short = [_too_many(each, most, rate) for each, most in full if most < rate]
        return [*_glance(search, held, slo), *excluded, *short]
    full.sort(key=lambda pair: -pair[1])
    return [*(_at_most(search, each, most) for each, most in full[:_ENOUGH]), *excluded]


def order(candidate: Candidate, slo: Slo) -> tuple[bool, bool, float, float, float]:
    """What is held before what is not, what meets the SLO before what does not, then by tokens a second and GPU. Of
    what is not held, the most first.
    """
    excess = slo.excess(candidate.prediction)
    speed = candidate.per_gpu if candidate.is_held else candidate.throughput
    near = round(max(excess, 1.0), 2)
    return not candidate.is_held, excess > 1, near, -round(speed, 6), candidate.prediction.tpot.mid


def _fewest(search: Search, full: Loaded, most: float) -> list[tuple[Loaded, float]]:
    """The fewest replicas that hold the rate, with what they hold."""
    rate = search.workload.rate or 0.0
    for replicas in range(max(1, ceil(rate / most * full.replicas)), full.replicas):
        fewer = _with_replicas(search, full, replicas)
        capacity = fewer.capacity
        if capacity >= rate:
            return [(fewer, capacity)]
    return [(full, most)]


def _with_replicas(search: Search, loaded: Loaded, replicas: int) -> Loaded:
    split = loaded.expert_parallel, loaded.stages, loaded.attention_ranks
    found = search.load(loaded.engine, loaded.fit.weight_format, loaded.tp, replicas, *split)
    assert isinstance(found, Loaded), "fewer replicas need no more room"
    return found


def _glance(search: Search, held: list[tuple[Loaded, float]], slo: Slo) -> list[Candidate]:
    """Those with the fewest GPUs first; where one misses the SLO, half as many replicas more."""
    ticket = count()
    queue = [(loaded.gpus, next(ticket), loaded, capacity) for loaded, capacity in held]
    heapify(queue)
    found: dict[Key, tuple[Loaded, Candidate]] = {}
    met = 0
    while queue and met < _ENOUGH and len(found) < _MOST_GLANCES:
        *_, loaded, capacity = heappop(queue)
        candidate = _deployed(search, loaded, capacity, SteadyWatch(_GLANCE))
        found[_key(loaded)] = loaded, candidate
        if candidate.is_held and slo.excess(candidate.prediction) <= 1:
            met += 1
        elif (more := _half_as_many_more(search, loaded)) is not None:
            heappush(queue, (more.gpus, next(ticket), more, more.capacity))
    _look(search, found, slo)
    return [candidate for _, candidate in found.values()]


def _look(search: Search, found: dict[Key, tuple[Loaded, Candidate]], slo: Slo) -> None:
    """A long look at the best, until the best is one that was looked at."""
    seen: set[Key] = set()
    for _ in range(_MOST_LOOKS):
        loaded, glanced = min(found.values(), key=lambda pair: order(pair[1], slo))
        if _key(loaded) in seen:
            return
        seen.add(_key(loaded))
        candidate = _deployed(search, loaded, glanced.capacity or 0.0, SteadyWatch(_LOOK))
        found[_key(loaded)] = loaded, candidate
        misses = not candidate.is_held or slo.excess(candidate.prediction) > 1
        more = _half_as_many_more(search, loaded) if misses else None
        if more is not None and _key(more) not in found:
            found[_key(more)] = more, _deployed(search, more, more.capacity, SteadyWatch(_GLANCE))


def _half_as_many_more(search: Search, loaded: Loaded) -> Loaded | None:
    most = search.machine.most_replicas(loaded.tp * loaded.stages)
    if loaded.replicas == most:
        return None
    return _with_replicas(search, loaded, min(most, ceil(1.5 * loaded.replicas)))


def _key(loaded: Loaded) -> Key:
    split = loaded.tp, loaded.stages, loaded.attention_ranks
    return loaded.engine.name, loaded.fit.weight_format, *split, loaded.replicas


def _deployed(search: Search, loaded: Loaded, capacity: float, watch: SteadyWatch) -> Candidate:
    candidate = search.deploy(loaded, watch)
    return dataclasses.replace(candidate, capacity=capacity, is_held=candidate.prediction.is_held)


def _at_most(search: Search, loaded: Loaded, capacity: float) -> Candidate:
    """At the rate that it can hold, which is not the one that was asked for."""
    share = dataclasses.replace(loaded.share, rate=capacity / loaded.replicas / loaded.stages / loaded.attention_ranks)
    candidate = search.deploy(dataclasses.replace(loaded, share=share), SteadyWatch(_GLANCE))
    return dataclasses.replace(candidate, capacity=capacity, is_held=False)


def _too_many(loaded: Loaded, capacity: float, rate: float) -> Excluded:
    found = f"{loaded.replicas} x TP={loaded.tp} hold {capacity:.3g} of {rate:g} requests/s."
    fix = f"{ceil(rate / capacity * loaded.replicas)} replicas would hold them."
    return Excluded(loaded.engine.name, loaded.tp, loaded.fit.weight_format, "rate_too_high", found, fix)
