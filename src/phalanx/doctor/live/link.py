"""What lies between the machines of a deployment, as a trace shows it, and what may be expected of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf

import msgspec

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.cost.profiles import profile
from phalanx.engine.marks import LinkPace, StepTraces
from phalanx.spec.network import Link
from phalanx.trace.timeline import Call, Step, mean_period

_ENOUGH_CALLS = 8
"""All-reduces of a size, of which the fastest tells what the link does."""
_SURE_RATE = 125e6
"""TCP does this on any processor, also on one that has other work: no more is expected of a card."""


class LinkSeen(msgspec.Struct, frozen=True, kw_only=True):
    """By all-reduces that are mostly bytes. Of each size the fastest counts: other work on a machine makes some slower,
    a slow link all. Times in ms a step, of all steps; rates in bytes a second each way.

    What is expected is what the ranks measured when they had just met, or, where that is more, what their network cards
    are good for (`by_cards`).
    """

    between: list[str]
    step: float
    took: float
    expected: float
    rate: float
    expected_rate: float
    by_cards: bool = False


def nodes_of(traces: StepTraces) -> list[str]:
    return list(dict.fromkeys(rank.node for rank in traces.ranks))


def seen_link(steps: Sequence[Step], traces: StepTraces) -> LinkSeen | None:
    """None where ranks are on one machine, or nothing they sent was mostly bytes."""
    ranks, nodes, paces = len(traces.ranks), nodes_of(traces), [rank.pace for rank in traces.ranks if rank.pace]
    if len(nodes) == 1 or len(paces) < ranks:
        return None
    met, card = paces[0], min(pace.card for pace in paces)
    fastest, sizes = _fastest(steps), Counter(call.size for call in _all_reduces(steps))
    at_first = {size: met.seconds(size) for size in sizes}
    expected = {size: min(at_first[size], _by_cards(size, ranks, card, met)) for size in sizes}
    judged = [size for size in sizes if sizes[size] >= _ENOUGH_CALLS and expected[size] > 2 * met.latency]
    if not judged:
        return None
    took, should, met_took = (
        sum(sizes[size] * seconds[size] for size in judged) for seconds in (fastest, expected, at_first)
    )
    sent = sum(sizes[size] * size for size in judged) * 2 * (ranks - 1) / ranks
    return LinkSeen(
        between=nodes,
        step=mean_period(steps) * 1e-6,
        took=took * 1e3 / len(steps),
        expected=should * 1e3 / len(steps),
        rate=sent / took,
        expected_rate=sent / should,
        by_cards=should < met_took,
    )


def _all_reduces(steps: Sequence[Step]) -> list[Call]:
    return [call for step in steps for call in step.calls if call.kind == "all-reduce"]


def _by_cards(size: int, ranks: int, card: float, met: LinkPace) -> float:
    """Seconds that an all-reduce should take at most where the cards tell their rate."""
    link = Link("ethernet", min(card, _SURE_RATE))
    return met.latency + all_reduce_seconds(size, ranks, link, profile("phalanx").all_reduce) if card else inf


def _fastest(steps: Sequence[Step]) -> dict[int, float]:
    """Seconds by size, of the rank that was in it the least, which is the last to come: it takes no common clock."""
    found: defaultdict[int, float] = defaultdict(lambda: inf)
    for call in _all_reduces(steps):
        least = min(left - came for came, left in zip(call.came, call.left, strict=True)) * 1e-9
        found[call.size] = min(found[call.size], least)
    return found
