"""The fitted numbers: rates of every engine family, corrections, and the widths of intervals."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from math import exp, sqrt
from pathlib import Path

import msgspec

from phalanx.cost.correction import Traits, effects, far_from_usual
from phalanx.cost.price import Rates
from phalanx.spec.machine import Gpu

FITTED_FILE = Path(__file__).with_name("fitted.json")


def pair_of(traits: Traits) -> str:
    """The engine, any version of it, and the architecture of the card."""
    return f"{traits.family.partition('-')[0]}@{Gpu.named(traits.gpu).architecture}"


class Width(msgspec.Struct, frozen=True):
    """Halves of 90 % intervals, as logarithms: overall and by engine family for what the fit has seen the like of, and
    by what is `new` to it ("publisher", "gpu", "model", "pair": an engine on this architecture), from fits that a whole
    one of these was left out of.
    """

    overall: float
    families: dict[str, float]
    new: dict[str, float] = {}

    def half(self, family: str, new: Iterable[str]) -> float:
        """What is new adds up as variances do."""
        seen = self.families.get(family, self.overall)
        wider = (max(0.0, self.new.get(what, 0.0) ** 2 - self.overall**2) for what in new)
        return sqrt(seen**2 + sum(wider))


class Quantity(msgspec.Struct, frozen=True):
    """How the prediction of one quantity is corrected, and how far off it may be."""

    effects: dict[str, float]
    width: Width

    def correction(self, traits: Traits) -> float:
        """The factor on what the cost model says."""
        return exp(sum(strength * self.effects.get(f"{kind}:{name}", 0.0) for kind, name, strength in effects(traits)))

    def leaning(self, traits: Traits, lengths: Sequence[int], clients: Sequence[int]) -> list[list[float]]:
        """What of the correction comes from the tokens of a prompt and the number of clients, as a logarithm, up to a
        constant.
        """
        load, prefixes = traits.workload, (f"slope:{traits.family}/", f"model_slope:{traits.family}/{traits.model}/")

        def strength(name: str) -> float:
            return sum(self.effects.get(prefix + name, 0.0) for prefix in prefixes)

        tp, output = far_from_usual("tp", traits.tp), far_from_usual("output", load.output_tokens)
        by_length = strength("input") + tp * strength("tp*input") + output * strength("input*output")
        by_clients = strength("concurrency") + tp * strength("tp*concurrency") + output * strength("concurrency*output")
        both, length_twice = strength("concurrency*input"), strength("input*input")
        clients_twice = strength("concurrency*concurrency")
        far = [far_from_usual("concurrency", many) for many in clients]
        return [
            [x * (by_length + length_twice * x + both * y) + y * (by_clients + clients_twice * y) for y in far]
            for x in (far_from_usual("input", length) for length in lengths)
        ]


class Fitted(msgspec.Struct, frozen=True):
    """All that calibration learned, from which files and when."""

    source: str
    date: str
    rows: int
    models: list[str]
    gpus: list[str]
    publishers: list[str]
    rates: dict[str, dict[str, float]]
    tpot: Quantity
    ttft: Quantity
    pairs: list[str] = []

    def family_rates(self, family: str, architecture: str = "") -> Rates:
        """On this architecture, or on any where it was never measured. Profiles of earlier versions have rates that are
        no more.
        """
        known = self.rates.get(f"{family}@{architecture}", self.rates[family])
        return Rates(**{name: value for name, value in known.items() if name in Rates._fields})

    def new_of(self, traits: Traits) -> list[str]:
        """What the fit has not seen of a deployment."""
        unseen = {
            "publisher": traits.publisher not in self.publishers,
            "gpu": traits.gpu not in self.gpus,
            "model": traits.model not in self.models,
            "pair": bool(self.pairs) and pair_of(traits) not in self.pairs,
        }
        return [what for what, is_new in unseen.items() if is_new]


def own_file(gpu: str) -> Path:
    """Where `phalanx calibrate` keeps what it found on machines with this GPU."""
    folder = os.environ.get("PHALANX_PROFILES")
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder or f"{config}/phalanx/profiles").expanduser() / f"{gpu}.json"


def fitted_for(engine: str, gpu: str) -> Fitted:
    """Of Phalanx on a GPU that it was calibrated on, what was found there; else what the product comes with."""
    own = own_file(gpu)
    return load_fitted(own) if engine == "phalanx" and own.exists() else load_fitted()


@cache
def load_fitted(path: Path = FITTED_FILE) -> Fitted:
    return msgspec.json.decode(path.read_bytes(), type=Fitted)


def write_fitted(fitted: Fitted, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(fitted), indent=1) + b"\n")
