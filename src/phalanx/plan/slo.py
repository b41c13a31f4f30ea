"""Slo: how long a user will wait."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from phalanx.errors import ConfigError
from phalanx.plan.predict import Interval, percentile

_SLO_NAMES = ("ttft", "tpot")
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)-(\w+)|(\w+)-p(\d{1,2}(?:\.\d+)?)")


class Latencies(Protocol):
    """What requests saw: mean seconds, and those of each."""

    @property
    def ttft(self) -> Interval: ...

    @property
    def tpot(self) -> Interval: ...

    @property
    def requests_ttft(self) -> Sequence[float]: ...

    @property
    def requests_tpot(self) -> Sequence[float]: ...


@dataclass(frozen=True)
class Goal:
    """Seconds that `share` of all requests may take at most, to the first token (`ttft`) or between tokens (`tpot`)."""

    quantity: str
    share: float
    seconds: float

    @property
    def name(self) -> str:
        return f"p{100 * self.share:g}-{self.quantity}"


@dataclass(frozen=True)
class Slo:
    """The longest bearable mean time to the first token and between tokens, in seconds (None does not matter), and
    goals for percentiles of them.
    """

    ttft: float | None = None
    tpot: float | None = None
    tails: tuple[Goal, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft:800,tpot:50` or `p95-ttft:800,p99-tpot:60` in milliseconds."""
        means: dict[str, float] = {}
        tails: dict[str, Goal] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition(":")
            name = name.strip().lower()
            matched = _PERCENTILE.fullmatch(name)
            quantity = (matched[2] or matched[3]) if matched else name
            if quantity not in _SLO_NAMES:
                near = get_close_matches(quantity, _SLO_NAMES, n=1, cutoff=0.3) or _SLO_NAMES
                raise ConfigError(
                    "bad_slo",
                    f"The SLO names {name!r}.",
                    f"Did you mean {near[0]}? Write ttft:800,tpot:50 or p95-ttft:800,p99-tpot:60.",
                )
            seconds = _milliseconds(name, value)
            if matched is None:
                means[quantity] = seconds
            else:
                goal = Goal(quantity, float(matched[1] or matched[4]) / 100, seconds)
                tails[goal.name] = goal
        return cls(**means, tails=tuple(tails.values()))

    @property
    def goals(self) -> dict[str, float]:
        """Seconds by the name of what they bound."""
        means = {"ttft": self.ttft, "tpot": self.tpot}
        told = {name: seconds for name, seconds in means.items() if seconds is not None}
        return told | {goal.name: goal.seconds for goal in self.tails}

    def excess(self, prediction: Latencies) -> float:
        """The largest ratio of what is predicted to what is allowed; at most 1 when the SLO is met."""
        ratios = [predicted / allowed for _, predicted, allowed in self._compared(prediction)]
        return max(ratios, default=0.0)

    def missed(self, prediction: Latencies) -> list[tuple[str, float, float]]:
        """Name, predicted and allowed seconds of every goal that is missed."""
        return [goal for goal in self._compared(prediction) if goal[1] > goal[2]]

    def _compared(self, prediction: Latencies) -> Iterator[tuple[str, float, float]]:
        if self.ttft is not None:
            yield "ttft", prediction.ttft.mid, self.ttft
        if self.tpot is not None:
            yield "tpot", prediction.tpot.mid, self.tpot
        for goal in self.tails:
            seen = prediction.requests_ttft if goal.quantity == "ttft" else prediction.requests_tpot
            yield goal.name, percentile(seen, goal.share), goal.seconds


def _milliseconds(name: str, value: str) -> float:
    try:
        number = float(value.strip().removesuffix("ms"))
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ConfigError(
            "bad_slo", f"The SLO says {name} {value!r}.", f"Write milliseconds above 0, such as {name}:50."
        )
    return number / 1000
