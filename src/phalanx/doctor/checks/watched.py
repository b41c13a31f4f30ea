"""GPUs over a minute: who works, who waits, and who is held down."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding

_OFTEN = 0.05
"""Of the samples, from which on a slowdown is more than a blink."""
_UNEVEN = 25
"""Percent points of utilisation between cards that share their work."""
_HARMFUL = ("hw-slowdown", "sw-thermal", "hw-thermal", "power-brake")


def watched(facts: Facts) -> Iterator[Finding]:
    """What a minute showed."""
    seen = facts.watched
    if not seen:
        return
    held = {
        each.gpu: {why: share for why, share in each.throttle.items() if why in _HARMFUL and share >= _OFTEN}
        for each in seen
    }
    slow = {gpu: reasons for gpu, reasons in held.items() if reasons}
    told = ", ".join(f"GPU {each.gpu} {each.utilisation:.0f} %" for each in seen)
    seconds = f"{seen[0].seconds:.0f} s"
    if slow:
        listed = "; ".join(
            f"GPU {gpu}: {', '.join(f'{why} {share:.0%} of the time' for why, share in reasons.items())}"
            for gpu, reasons in slow.items()
        )
        yield Finding(
            "warning",
            "watched",
            "Clocks were held down while watched",
            f"{listed} ({seconds})",
            "One card that is slow makes every rank wait at each all-reduce.",
            "Heat: air or flow. Power brake: supplies. A lower power limit on all cards costs less than throttling.",
        )
    busy = [each.utilisation for each in seen]
    if max(busy) - min(busy) > _UNEVEN and max(busy) > _UNEVEN:
        yield Finding(
            "note",
            "watched",
            "GPUs worked unevenly while watched",
            f"{told} ({seconds})",
            "Ranks of one group work alike; replicas do not where requests are not spread evenly.",
            "Look at the balancer in front of the replicas, or at a rank that others wait for.",
        )
    elif not slow:
        yield Finding("ok", "watched", f"Over {seconds}", told)
