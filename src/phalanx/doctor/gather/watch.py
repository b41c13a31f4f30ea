"""GPUs over some time: utilisation and what holds their clocks down, sampled once a second by NVML."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from phalanx.doctor.facts import Watched
from phalanx.doctor.gather.nvml import binding, throttle_of
from phalanx.doctor.gather.nvml.device import Device
from phalanx.errors import ConfigError

_PERIOD_S = 1.0


def watch(seconds: float, nvml: Any = None, sleep: Callable[[float], None] = time.sleep) -> tuple[Watched, ...]:
    """Of every GPU that answers: mean utilisation, and the share of samples in which each reason held it down."""
    nvml = nvml or binding()
    try:
        nvml.nvmlInit()
        devices = {
            index: Device(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())
        }
    except nvml.NVMLError as error:
        raise ConfigError("no_nvml", f"NVML cannot be asked: {error}.", "--watch needs NVIDIA GPUs.") from None
    rounds = max(1, round(seconds / _PERIOD_S))
    busy: dict[int, list[int]] = {index: [] for index in devices}
    held: dict[int, dict[str, int]] = {index: {} for index in devices}
    for turn in range(rounds):
        for index, device in devices.items():
            rates = device.ask("utilisation", "nvmlDeviceGetUtilizationRates")
            if rates is not None:
                busy[index].append(rates.gpu)
            for reason in throttle_of(device) or ():
                held[index][reason] = held[index].get(reason, 0) + 1
        if turn + 1 < rounds:
            sleep(_PERIOD_S)
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()
    return tuple(
        Watched(
            gpu=index,
            seconds=rounds * _PERIOD_S,
            utilisation=sum(seen) / len(seen),
            throttle={reason: times / rounds for reason, times in held[index].items()},
        )
        for index, seen in busy.items()
        if seen
    )
