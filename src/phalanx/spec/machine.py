"""Gpu, Link, Machine: what the hardware is. The catalogue is `gpus.toml`; a machine is written `4xH100-SXM`."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import PhalanxError
from phalanx.spec.calibration import Calibration, CalibrationError

CATALOGUE = Path(__file__).with_name("gpus.toml")
LinkKind = Literal["nvswitch", "nvlink-bridge", "mesh", "pcie", "roce"]

_GIGA = 1e9
_TERA = 1e12
_MOST_GPUS = 1024
_PART = re.compile(r"(?:(?P<count>-?\d+)\s*[x*])?\s*(?P<name>.+)", re.IGNORECASE)


class MachineError(PhalanxError):
    """The machine is written wrongly or cannot exist."""


@dataclass(frozen=True)
class Price:
    """USD: rent per GPU hour (low, median, high), owning per GPU hour (hyperscaler, neocloud), purchase (low, high)."""

    rent: tuple[float, float, float] | None
    clouds: int
    own: tuple[float, float] | None
    buy: tuple[float, float] | None
    date: str


@dataclass(frozen=True)
class Link:
    """How ranks reach each other: bytes per second one way per GPU."""

    kind: LinkKind
    bandwidth: float


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Memory is what the driver reports; peaks are dense, in FLOP/s by number format.

    `nvlinks` are the counts of active links that are right for it, when they are in use at all.
    """

    name: str
    vendor: str
    architecture: str
    capability: str
    memory_bytes: int
    unified_memory: bool
    bandwidth: float
    peaks: dict[str, float]
    link: Link
    link_gpus: int
    beyond: Link
    power_w: float
    all_in_power_w: float | None
    price: Price
    source: str
    confidence: str
    notes: str
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    nvlinks: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)

    def peak(self, number_format: str) -> float:
        """Dense FLOP/s when both operands have this format; a format the GPU cannot multiply runs at its bf16 rate."""
        return self.peaks.get(number_format, self.peaks["bf16"])

    @classmethod
    def named(cls, name: str) -> Gpu:
        """The GPU of this name, alias or driver name; capitals, blanks and dashes do not matter."""
        known = _by_spelling()
        found = known.get(_spelling(name))
        if found is not None:
            return found
        near = difflib.get_close_matches(_spelling(name), known, n=3, cutoff=0.4)
        names = list(dict.fromkeys(known[spelling].name for spelling in near)) or [gpu.name for gpu in gpus()]
        raise MachineError(
            "unknown_gpu", f"No GPU is called {name!r}.", f"The nearest known: {', '.join(names)} (all: gpus.toml)."
        )


@dataclass(frozen=True)
class Machine:
    """GPUs in rank order. Tensor-parallel ranks all do the same work, so the weakest GPU bounds every rank.

    `calibration` is what this very machine was measured to do; None: it does what its datasheets say.
    """

    gpus: tuple[Gpu, ...]
    calibration: Calibration | None = None

    @classmethod
    def parse(cls, text: str) -> Machine:
        """`4xH100-SXM`, `8xH200`, `4xDGX-Spark`, `2xRTX4090+1xRTX3090`; a name alone is one GPU."""
        gpus = tuple(gpu for part in text.split("+") for gpu in _parse_part(part, text))
        vendors = sorted({gpu.vendor for gpu in gpus})
        if len(vendors) > 1:
            raise MachineError(
                "mixed_vendors",
                f"{text!r} mixes {' and '.join(vendors)}, which cannot share one model.",
                f"Use one vendor, such as {_spell(tuple(gpu for gpu in gpus if gpu.vendor == gpus[0].vendor))}.",
            )
        return cls(gpus)

    @property
    def name(self) -> str:
        return _spell(self.gpus)

    @property
    def is_mixed(self) -> bool:
        return len({gpu.name for gpu in self.gpus}) > 1

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, count: int) -> Machine:
        """The first `count` GPUs as a machine of their own."""
        return self.part(0, count)

    def part(self, first: int, count: int) -> Machine:
        """`count` GPUs from `first` on; what was measured of the whole holds for them."""
        return dataclasses.replace(self, gpus=self.gpus[first : first + count])

    def calibrated(self, calibration: Calibration) -> Machine:
        """The same machine as measured. A measurement of other GPUs is refused."""
        mine, measured = ({gpu.name for gpu in side.gpus} for side in (self, calibration))
        if mine != measured:
            raise CalibrationError(
                "other_gpu",
                f"The calibration is of {calibration.machine}, the plan is for {self.name}.",
                "Measure the machine that you plan for, or plan without a calibration.",
            )
        return dataclasses.replace(self, calibration=calibration)

    @property
    def smallest(self) -> Gpu:
        """The GPU with the least memory: what every rank has to fit in."""
        return min(self.gpus, key=lambda gpu: gpu.memory_bytes)

    def link(self, ranks: int) -> Link:
        """What an all-reduce over the first `ranks` GPUs passes at its narrowest point."""
        group = self.gpus[:ranks]
        mixed = len({gpu.name for gpu in group}) > 1
        if not mixed and ranks <= group[0].link_gpus:
            return group[0].link
        return min((gpu.beyond for gpu in group), key=lambda link: link.bandwidth)


@cache
def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalogue."""
    entries = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))["gpu"]
    return tuple(_read_gpu(entry) for entry in entries)


def _read_gpu(entry: dict[str, Any]) -> Gpu:
    beyond = Link("roce" if entry["link"] == "roce" else "pcie", entry["beyond_gbs"] * _GIGA)
    inside = Link(entry["link"], entry["link_gbs"] * _GIGA) if "link_gbs" in entry else beyond
    peaks = {name: entry[f"{name}_tflops"] * _TERA for name in ("bf16", "fp8", "fp4") if f"{name}_tflops" in entry}
    price = Price(
        rent=_numbers(entry, "rent_usd_h"),
        clouds=entry.get("rent_clouds", 0),
        own=_numbers(entry, "own_usd_h"),
        buy=_numbers(entry, "buy_usd"),
        date=entry.get("price_date", ""),
    )
    return Gpu(
        name=entry["name"],
        vendor=entry["vendor"],
        architecture=entry["architecture"],
        capability=entry.get("capability", ""),
        memory_bytes=entry["memory_mib"] * 2**20,
        unified_memory=entry.get("unified_memory", False),
        bandwidth=entry["bandwidth_gbs"] * _GIGA,
        peaks=peaks,
        link=inside,
        link_gpus=entry.get("link_gpus", 1),
        beyond=beyond,
        power_w=entry["power_w"],
        all_in_power_w=entry.get("all_in_power_w"),
        price=price,
        source=entry["source"],
        confidence=entry["confidence"],
        notes=entry.get("notes", ""),
        aliases=tuple(entry.get("aliases", ())),
        driver_names=tuple(entry.get("driver_names", ())),
        nvlinks=tuple(entry.get("nvlinks", ())),
    )


def _numbers(entry: dict[str, Any], key: str) -> Any:
    return tuple(entry[key]) if key in entry else None


def _spelling(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _by_spelling() -> dict[str, Gpu]:
    return {_spelling(name): gpu for gpu in gpus() for name in (gpu.name, *gpu.aliases, *gpu.driver_names)}


def _parse_part(part: str, whole: str) -> tuple[Gpu, ...]:
    matched = _PART.fullmatch(part.strip())
    if matched is None:
        raise MachineError("bad_machine", f"{whole!r} has an empty part.", "Write it as 4xH100-SXM or 2xRTX4090+1xL4.")
    count = int(matched["count"] or 1)
    gpu = Gpu.named(matched["name"])
    if not 1 <= count <= _MOST_GPUS:
        raise MachineError(
            "bad_count", f"{whole!r} asks for {count} GPUs.", f"Ask for 1 to {_MOST_GPUS}, such as 1x{gpu.name}."
        )
    return (gpu,) * count


def _spell(group: tuple[Gpu, ...]) -> str:
    return "+".join(f"{count}x{name}" for name, count in Counter(gpu.name for gpu in group).items())
