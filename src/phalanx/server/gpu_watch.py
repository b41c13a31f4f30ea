"""GpuWatch: memory, power and temperature of this machine's GPUs, once a second, in a thread: drivers may be slow."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from threading import Thread
from typing import Any

import msgspec
from prometheus_client.core import GaugeMetricFamily

from phalanx.doctor.gather.found import has_unified_memory
from phalanx.doctor.gather.nvml import NvmlError, binding, memory_of, watts_of
from phalanx.doctor.gather.nvml.device import Device, as_text

log = logging.getLogger("phalanx.server")

EVERY_S = 1.0
STALE_S = 5.0
_GIB, _MIB_A_GIB = 2**30, 1024
_OF_GPU = 0
_GAUGES = (
    ("memory_used", "gpu_memory_used_bytes", "Memory in use on a GPU.", _GIB),
    ("memory", "gpu_memory_total_bytes", "Memory of a GPU.", _GIB),
    ("watts", "gpu_power_watts", "Power that a GPU draws.", 1),
    ("watts_limit", "gpu_power_limit_watts", "Power that a GPU may draw.", 1),
    ("celsius", "gpu_temperature_celsius", "Temperature of a GPU.", 1),
)


class GpuReading(msgspec.Struct, frozen=True):
    """A GPU now. Memory is in GiB; None is what this card does not tell."""

    gpu: int
    name: str
    memory_used: float | None
    memory: float | None
    watts: float | None
    watts_limit: float | None
    celsius: int | None


class GpuWatch:
    """Looks at the GPUs this process may see. Without NVML there are none, and that is no error.

    It is a collector of Prometheus too: what it last saw are gauges.
    """

    def __init__(self, nvml: Any = None, environment: Mapping[str, str] = os.environ) -> None:
        self._nvml = nvml
        self._visible = environment.get("CUDA_VISIBLE_DEVICES")
        self._seen: list[GpuReading] = []
        self._seen_at = 0.0

    def start(self) -> None:
        Thread(target=self._watch, name="gpu-watch", daemon=True).start()

    def readings(self) -> list[GpuReading]:
        """What was seen last; nothing where that is too long ago, as with a driver that hangs."""
        return self._seen if time.monotonic() - self._seen_at < STALE_S else []

    def look(self) -> None:
        """Ask all cards. Raises NvmlError where they cannot be asked."""
        nvml = self._nvml = self._nvml or _started(binding())
        self._seen = [_reading(nvml, index, handle) for index, handle in self._handles(nvml)]
        self._seen_at = time.monotonic()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        readings = self.readings()
        for field, name, text, unit in _GAUGES:
            told = [(each.gpu, getattr(each, field)) for each in readings if getattr(each, field) is not None]
            if told:
                gauge = GaugeMetricFamily(f"phalanx:{name}", text, labels=["gpu"])
                for gpu, value in told:
                    gauge.add_metric([str(gpu)], value * unit)
                yield gauge

    def _watch(self) -> None:
        try:
            while True:
                self.look()
                time.sleep(EVERY_S)
        except Exception as error:  # whatever the binding makes of a driver it does not know
            log.info("GPUs are not watched: %s", error)

    def _handles(self, nvml: Any) -> Iterator[tuple[int, Any]]:
        chosen = [name.strip() for name in (self._visible or "").split(",")]
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                if not self._visible or str(index) in chosen or _uuid(nvml, handle) in chosen:
                    yield index, handle


def _started(nvml: Any) -> Any:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlError(str(error)) from None
    return nvml


def _uuid(nvml: Any, handle: Any) -> str:
    return as_text(Device(nvml, handle).ask("its id", "nvmlDeviceGetUUID")) or ""


def _reading(nvml: Any, index: int, handle: Any) -> GpuReading:
    device = Device(nvml, handle)
    name = as_text(device.ask("its name", "nvmlDeviceGetName")) or "GPU"
    total, used = (None, None) if has_unified_memory(name) else memory_of(device)
    return GpuReading(
        gpu=index,
        name=name,
        memory_used=None if used is None else used / _MIB_A_GIB,
        memory=None if total is None else total / _MIB_A_GIB,
        watts=watts_of(device.ask("power", "nvmlDeviceGetPowerUsage")),
        watts_limit=watts_of(device.ask("power limit", "nvmlDeviceGetPowerManagementLimit")),
        celsius=device.ask("its temperature", "nvmlDeviceGetTemperature", _OF_GPU),
    )
