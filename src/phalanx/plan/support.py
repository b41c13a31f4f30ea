"""Which engine runs on which cards, in which formats: `support.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.spec.machine import Gpu, Machine


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads((files("phalanx.plan") / "support.toml").read_text(encoding="utf-8"))


@cache
def _table() -> dict[tuple[str, str], dict[str, str]]:
    """Formats with the least compute capability they need, by engine and vendor."""
    return {(entry["engine"], entry["vendor"]): entry["formats"] for entry in _file()["support"]}


def loads_checkpoint(engine: str, gpu: Gpu, checkpoint: str) -> bool:
    """Whether an engine loads a checkpoint of this id on this card, as far as its owner's form is bound to some."""
    return all(
        gpu.vendor == known["vendor"] and _version(gpu.capability) >= _version(known["capability"])
        for known in _file()["checkpoints"]
        if engine in known["engines"] and checkpoint.startswith(f"{known['owner']}/")
    )


@cache
def formats_on(engine: str, gpu: Gpu) -> tuple[str, ...]:
    """The formats an engine loads on this card; none where it does not run at all."""
    known = _table().get((engine, gpu.vendor), {})
    return tuple(name for name, least in known.items() if _version(gpu.capability) >= _version(least))


def refusal(engine: str, title: str, machine: Machine, number_format: str) -> str | None:
    """Why an engine cannot serve this format on some card of the machine."""
    for gpu in dict.fromkeys(machine.gpus):
        formats = formats_on(engine, gpu)
        if not formats:
            return f"{title} has no kernels for {gpu.name} ({_runs_on(engine)})."
        if number_format not in formats:
            return f"{title} does not load {number_format} on {gpu.name}; there it loads {', '.join(formats)}."
    return None


def _runs_on(engine: str) -> str:
    cards = []
    for (name, vendor), formats in _table().items():
        if name == engine:
            least = min(formats.values(), key=_version)
            cards.append(f"{vendor} from compute capability {least} on" if least else vendor)
    return "it runs on " + ", ".join(cards)


def _version(text: str) -> tuple[int, ...]:
    """`9.0` as numbers; cards of vendors without such numbers meet any."""
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()
