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
from typing import Any

from phalanx.spec.calibration import Calibration, CalibrationError
from phalanx.spec.network import Link, LinkKind, MachineError, Network, network

__all__ = ["Gpu", "Link", "LinkKind", "Machine", "MachineError", "Price", "gpus"]
CATALOGUE = Path(__file__).with_name("gpus.toml")

_GIGA = 1e9
_TERA = 1e12
_MOST_GPUS = 1024
_BOXES = re.compile(r"(?P<boxes>\d+)\s*[x*]\s*(?P<box>\d+\s*[x*]\s*[^+]+)", re.IGNORECASE)
_PART = re.compile(r"(?:(?P<count>-?\d+)\s*[x*])?\s*(?P<name>.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Price:
    """USD: rent per GPU hour (low, median, high), owning per GPU hour (hyperscaler, neocloud), purchase (low, high)."""

    rent: tuple[float, float, float] | None
    clouds: int
    own: tuple[float, float] | None
    buy: tuple[float, float] | None
    date: str


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Memory is what the driver reports; peaks are dense, in FLOP/s by number format.

    `nvlinks` are the counts of active links that are right for it, when they are in use at all. `grade`: whose warranty
    covers it; `ecc`: memory errors are corrected; `mig`: it can be cut into several.
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
    grade: str = ""
    ecc: bool = False
    mig: bool = False

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

    `calibration` is what this very machine was measured to do; None: it does what its datasheets say. Several boxes
    have `per_box` GPUs each and a `network` between them; 0: all GPUs are in one box.
    """

    gpus: tuple[Gpu, ...]
    calibration: Calibration | None = None
    per_box: int = 0
    network: Network | None = None

    @classmethod
    def parse(cls, text: str, network_name: str = "") -> Machine:
        """`4xH100-SXM`, `8xH200`, `4xDGX-Spark`, `2xRTX4090+1xRTX3090`, `2x8xH100-SXM`; a name alone is one GPU."""
        boxes = _BOXES.fullmatch(text.strip())
        if boxes is not None:
            return cls._joined(int(boxes["boxes"]), cls.parse(boxes["box"]), network_name, text)
        gpus = tuple(gpu for part in text.split("+") for gpu in _parse_part(part, text))
        vendors = sorted({gpu.vendor for gpu in gpus})
        if len(vendors) > 1:
            raise MachineError(
                "mixed_vendors",
                f"{text!r} mixes {' and '.join(vendors)}, which cannot share one model.",
                f"Use one vendor, such as {_spell(tuple(gpu for gpu in gpus if gpu.vendor == gpus[0].vendor))}.",
            )
        whole = gpus[0].link_gpus
        if gpus[0].link.kind == "nvswitch" and len(gpus) > whole and len(gpus) % whole == 0 and len(set(gpus)) == 1:
            return cls._joined(len(gpus) // whole, cls(gpus[:whole]), network_name, text)
        if network_name and gpus[0].unified_memory:
            return cls._joined(len(gpus), cls(gpus[:1]), network_name, text)
        return cls(gpus)

    @classmethod
    def _joined(cls, count: int, box: Machine, network_name: str, text: str) -> Machine:
        if not 1 <= count <= _MOST_GPUS // len(box) or box.is_mixed or box.per_box:
            raise MachineError(
                "bad_count",
                f"{text!r} is no number of like boxes.",
                f"Write it as 2x8xH100-SXM; {_MOST_GPUS} GPUs at most.",
            )
        between = network(network_name or _usual_network(box.gpus[0]))
        return cls(box.gpus * count, per_box=len(box), network=between) if count > 1 else box

    @property
    def name(self) -> str:
        if self.boxes == 1 or self.gpus[0].unified_memory:
            return _spell(self.gpus)
        return f"{self.boxes}x{self.per_box}x{self.gpus[0].name}"

    @property
    def boxes(self) -> int:
        return -(-len(self.gpus) // self.per_box) if self.per_box else 1

    def most_replicas(self, ranks: int) -> int:
        """How many groups of so many ranks there are, none of which lies in more boxes than it must."""
        if not self.per_box:
            return len(self.gpus) // ranks
        if ranks <= self.per_box:
            return self.boxes * (self.per_box // ranks)
        return self.boxes // -(-ranks // self.per_box)

    def groups(self, ranks: int, count: int) -> list[Machine]:
        """The first `count` of these groups."""
        in_a_box = self.per_box // ranks
        if not self.per_box or not in_a_box:
            step = -(-ranks // self.per_box) * self.per_box if self.per_box else ranks
            return [self.part(number * step, ranks) for number in range(count)]
        starts = [number // in_a_box * self.per_box + number % in_a_box * ranks for number in range(count)]
        return [self.part(start, ranks) for start in starts]

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
        if self.network is not None and ranks > self.per_box:
            return self.network.link(dataclasses.replace(self, network=None).link(self.per_box), self.per_box)
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
        grade=entry["class"],
        ecc=entry["ecc"],
        mig=entry["mig"],
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


def _usual_network(gpu: Gpu) -> str:
    """Between boxes of this card where none is named."""
    if gpu.link.kind in ("nvswitch", "mesh"):
        return "ib-ndr"
    return "roce-200" if gpu.unified_memory or gpu.grade == "data center" else "10gbe"


def _spell(group: tuple[Gpu, ...]) -> str:
    return "+".join(f"{count}x{name}" for name, count in Counter(gpu.name for gpu in group).items())
