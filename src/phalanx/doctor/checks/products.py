"""What the checks know of a GPU besides its facts: its product, and the machine that the planner would call it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import groupby

from phalanx.doctor.facts import Facts, GpuFacts
from phalanx.spec.machine import Gpu, Machine, MachineError

MIB = 2**20
GIB = 2**30


def product(gpu: GpuFacts) -> Gpu | None:
    """The catalogue's entry of the name the driver gives; None where there is none."""
    try:
        return Gpu.named(gpu.name)
    except MachineError:
        return None


def is_spark(facts: Facts) -> bool:
    """A GB10: one GPU that shares the machine's memory."""
    return any("GB10" in gpu.name for gpu in facts.gpus)


def is_geforce(gpu: GpuFacts) -> bool:
    return "GeForce" in gpu.name


def needs_switch(gpu: GpuFacts) -> bool:
    """Whether the product only exists on boards that join all of its NVLinks."""
    known = product(gpu)
    return known is not None and known.link.kind == "nvswitch"


def machine_of(facts: Facts) -> Machine | None:
    """The GPUs as the planner knows them, with the memory that was found; None where one is not known."""
    found = [_with_memory(gpu, facts) for gpu in facts.gpus]
    known = tuple(each for each in found if each is not None)
    return Machine(known) if known and len(known) == len(found) else None


def _with_memory(gpu: GpuFacts, facts: Facts) -> Gpu | None:
    known = product(gpu)
    if known is None:
        return None
    size = facts.system.memory_bytes if gpu.unified else None
    if not gpu.unified and gpu.memory_total_mib:
        size = gpu.memory_total_mib * MIB
    return dataclasses.replace(known, memory_bytes=size) if size else known


def which(indices: Iterable[int]) -> str:
    """`GPU 0`, `GPUs 0-3, 6`."""
    ordered = sorted(set(indices))
    runs = [[index for _, index in run] for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'GPU' if len(ordered) == 1 else 'GPUs'} {', '.join(words)}"


def whose(gpus: Iterable[GpuFacts]) -> str:
    return which(gpu.index for gpu in gpus)


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
