"""The fitted numbers: rates of every engine family, corrections, and the widths of intervals."""

from __future__ import annotations

from functools import cache
from math import exp
from pathlib import Path

import msgspec

from phalanx.cost.correction import Traits, effects
from phalanx.cost.price import Rates

FITTED_FILE = Path(__file__).with_name("fitted.json")
_UNSEEN_MODEL = 1.4
_UNSEEN_GPU = 1.5


class Width(msgspec.Struct, frozen=True):
    """Half of a 90 % interval, as a logarithm: overall and by engine family."""

    overall: float
    families: dict[str, float]


class Quantity(msgspec.Struct, frozen=True):
    """How the prediction of one quantity is corrected, and how far off it may be."""

    effects: dict[str, float]
    width: Width

    def correction(self, traits: Traits) -> float:
        """The factor on what the cost model says."""
        return exp(sum(strength * self.effects.get(f"{kind}:{name}", 0.0) for kind, name, strength in effects(traits)))

    def half_width(self, traits: Traits, known_models: frozenset[str], known_gpus: frozenset[str]) -> float:
        width = self.width.families.get(traits.family, self.width.overall)
        if f"{traits.family}/{traits.model}" not in known_models:
            width *= _UNSEEN_MODEL
        return width if traits.gpu in known_gpus else width * _UNSEEN_GPU


class Fitted(msgspec.Struct, frozen=True):
    """All that calibration learned, from which files and when."""

    source: str
    date: str
    rows: int
    models: list[str]
    gpus: list[str]
    rates: dict[str, dict[str, float]]
    tpot: Quantity
    ttft: Quantity

    def family_rates(self, family: str) -> Rates:
        return Rates(**self.rates[family])


@cache
def load_fitted(path: Path = FITTED_FILE) -> Fitted:
    return msgspec.json.decode(path.read_bytes(), type=Fitted)


def write_fitted(fitted: Fitted, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(fitted), indent=1) + b"\n")
