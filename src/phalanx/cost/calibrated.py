"""How a calibration changes what a step costs.

The fitted rates are shares of datasheet speeds, from healthy H100 and H200. So a card counts by what it reaches against
what such a card reaches in the same test, the slowest card of the machine for all, because ranks wait for each other.
"""

from __future__ import annotations

from bisect import bisect_right
from math import exp, log

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.spec.calibration import AllReduceTimes, Calibration
from phalanx.spec.machine import Link

HEALTHY_COPY = 0.90
"""Share of datasheet bandwidth: H200s copied at 4.25 to 4.40 of 4.8 TB/s."""
HEALTHY_PRODUCT = {"bf16": 0.79, "fp8": 0.65}
"""Share of datasheet FLOP/s on random numbers: H200s reached 760 to 800 of 989 in bf16, 1285 of 1979 in FP8."""
MOST_GAIN = 1.03
"""A measurement better than that of a healthy card is luck or another datasheet, not a faster engine."""


def bandwidth_factor(calibration: Calibration | None) -> float:
    """Of memory bandwidth, against a healthy card."""
    if calibration is None:
        return 1.0
    return min(MOST_GAIN, min(gpu.bandwidth for gpu in calibration.gpus) / HEALTHY_COPY)


def compute_factor(calibration: Calibration | None, number_format: str) -> float:
    """Of FLOP/s in this format, against a healthy card; a format that was not measured goes by bf16."""
    if calibration is None:
        return 1.0
    return min(MOST_GAIN, *(_product(gpu.bf16, gpu.fp8, number_format) for gpu in calibration.gpus))


def _product(bf16: float | None, fp8: float | None, number_format: str) -> float:
    if number_format == "fp8" and fp8 is not None:
        return fp8 / HEALTHY_PRODUCT["fp8"]
    return 1.0 if bf16 is None else bf16 / HEALTHY_PRODUCT["bf16"]


def calibrated_all_reduce(
    size: float, ranks: int, link: Link, implementation: str, calibration: Calibration | None
) -> float:
    """Seconds: as measured where NCCL does it. An engine's own kernels slow down as NCCL does on the same link."""
    modelled = all_reduce_seconds(size, ranks, link, implementation)
    measured = None if calibration is None else _measured(size, ranks, calibration.all_reduces)
    if measured is None or modelled == 0:
        return modelled
    by_nccl = all_reduce_seconds(size, ranks, link, "nccl")
    if modelled == by_nccl:
        return measured
    return modelled * max(measured / by_nccl, 1 / MOST_GAIN)


def _measured(size: float, ranks: int, tables: tuple[AllReduceTimes, ...]) -> float | None:
    """Seconds; between rank counts straight in logarithms. None: more or fewer ranks than were measured."""
    below = next((table for table in reversed(tables) if table.ranks <= ranks), None)
    above = next((table for table in tables if table.ranks >= ranks), None)
    if below is None or above is None:
        return None
    low = _at_size(size, below)
    if above is below:
        return low
    return low * (_at_size(size, above) / low) ** (log(ranks / below.ranks) / log(above.ranks / below.ranks))


def _at_size(size: float, table: AllReduceTimes) -> float:
    """Seconds, straight in logarithms between sizes. Smaller ones take the latency, larger ones more by bandwidth."""
    sizes, times = table.sizes, table.microseconds
    if size <= sizes[0]:
        return times[0] * 1e-6
    if size >= sizes[-1]:
        return 1e-6 * (times[-1] + (size - sizes[-1]) * _microseconds_a_byte(table))
    index = bisect_right(sizes, size)
    part = log(size / sizes[index - 1]) / log(sizes[index] / sizes[index - 1])
    return 1e-6 * exp(log(times[index - 1]) * (1 - part) + log(times[index]) * part)


def _microseconds_a_byte(table: AllReduceTimes) -> float:
    """What the two largest sizes differ by, which leaves the latency out; where that shows no growth, all the time."""
    sizes, times = table.sizes, table.microseconds
    if len(sizes) > 1 and times[-1] > times[-2]:
        return (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    return times[-1] / sizes[-1]
