"""FoundGpus: what NVML or nvidia-smi tells, and what both need to say it the same way."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.doctor.facts import GpuFacts, GpuPath
from phalanx.spec.machine import Gpu, MachineError


@dataclass(frozen=True)
class FoundGpus:
    """The GPUs of a machine, how they reach each other, and the driver."""

    gpus: tuple[GpuFacts, ...] = ()
    lost: tuple[int, ...] = ()
    paths: tuple[GpuPath, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None


def has_unified_memory(name: str) -> bool:
    """Whether the GPU's memory is the machine's, so that what the driver says of it cannot be trusted."""
    try:
        return Gpu.named(name).unified_memory
    except MachineError:
        return "GB10" in name
