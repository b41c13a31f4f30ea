"""Slo: how long a user will wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from phalanx.errors import ConfigError
from phalanx.plan.predict import Prediction

_SLO_NAMES = ("ttft", "tpot")


@dataclass(frozen=True)
class Slo:
    """The longest bearable time to the first token and between tokens, in seconds; None does not matter."""

    ttft: float | None = None
    tpot: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft:800,tpot:50` in milliseconds."""
        found: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition(":")
            name = name.strip().lower()
            if name not in _SLO_NAMES:
                near = get_close_matches(name, _SLO_NAMES, n=1, cutoff=0.3) or _SLO_NAMES
                raise ConfigError(
                    "bad_slo", f"The SLO names {name!r}.", f"Did you mean {near[0]}? Write ttft:800,tpot:50."
                )
            found[name] = _milliseconds(name, value)
        return cls(**found)

    def excess(self, prediction: Prediction) -> float:
        """The larger ratio of what is predicted to what is allowed; at most 1 when the SLO is met."""
        ratios = [predicted / allowed for _, predicted, allowed in self._compared(prediction)]
        return max(ratios, default=0.0)

    def missed(self, prediction: Prediction) -> list[tuple[str, float, float]]:
        """Name, predicted and allowed seconds of every goal that is missed."""
        return [goal for goal in self._compared(prediction) if goal[1] > goal[2]]

    def _compared(self, prediction: Prediction) -> Iterator[tuple[str, float, float]]:
        if self.ttft is not None:
            yield "ttft", prediction.ttft.mid, self.ttft
        if self.tpot is not None:
            yield "tpot", prediction.tpot.mid, self.tpot


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
