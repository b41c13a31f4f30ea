"""All-reduce times by size, ranks and implementation.

On NVSwitch they are looked up: medians over H100 and H200 of the aiconfigurator kernel tables (Apache-2.0, read
2026-11-15), CUDA-graph mode, and those of A100 and B200 beside them. No ring formula fits them: above 8 MB eight
ranks are faster than four. Other links follow latency + bytes over bandwidth, with constants from public
measurements of DGX Spark over RoCE and, for latency on PCIe, from the tables of L40S and RTX PRO 6000; the latencies of
meshes, InfiniBand and Ethernet are estimates, to be replaced by measurements. Between boxes, ranks of a box reduce
first, and each then sends its part over a port of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import exp, log, log2

from phalanx.spec.machine import Link

_SIZES = tuple(8192 << power for power in range(17))
_TABLE_BANDWIDTH = 450e9
# fmt: off
_MICROSECONDS: dict[str, dict[int, tuple[float, ...]]] = {
    "vllm": {
        2: (4.5, 4.5, 4.5, 4.7, 4.8, 5.2, 6.3, 8.3, 12.4, 20.4, 43.0, 76.6, 144.8, 246.9, 463.0, 886.0, 1693.3),
        4: (4.8, 4.8, 4.9, 5.3, 5.8, 7.0, 10.5, 12.1, 17.8, 29.9, 52.0, 93.8, 173.7, 320.2, 609.9, 1180.9, 2313.1),
        8: (5.1, 5.2, 5.7, 6.5, 7.9, 10.1, 11.2, 14.1, 18.4, 28.7, 50.7, 87.2, 166.3, 323.3, 562.9, 1053.1, 2036.2),
    },
    "sglang": {
        2: (4.6, 4.6, 4.6, 4.7, 4.9, 5.2, 6.3, 8.4, 12.4, 20.4, 35.2, 76.9, 137.4, 247.6, 465.1, 887.8, 1680.7),
        4: (4.8, 4.8, 4.9, 5.2, 5.8, 7.2, 10.9, 12.4, 18.2, 30.2, 53.6, 98.7, 172.0, 322.5, 612.8, 1182.3, 2312.4),
        8: (5.1, 5.3, 5.7, 6.5, 8.0, 14.5, 15.4, 17.0, 20.5, 34.0, 61.0, 121.9, 196.8, 321.5, 570.0, 1071.4, 2076.7),
    },
    "trtllm": {
        2: (2.8, 2.9, 3.0, 3.1, 3.3, 3.8, 4.6, 6.1, 9.4, 16.8, 36.0, 78.5, 143.1, 252.6, 467.2, 887.2, 1699.3),
        4: (3.2, 3.3, 3.4, 3.7, 4.3, 5.5, 7.9, 12.9, 22.0, 35.9, 61.7, 99.9, 174.7, 324.1, 616.0, 1183.5, 2309.9),
        8: (3.6, 3.7, 4.0, 4.7, 6.4, 10.2, 17.6, 25.8, 30.4, 48.0, 78.6, 122.2, 196.9, 321.1, 569.7, 1071.7, 2076.8),
    },
    "nccl": {
        2: (6.8, 7.2, 7.2, 7.3, 7.6, 8.8, 10.5, 14.3, 27.2, 32.6, 46.0, 78.8, 140.8, 250.5, 464.4, 883.4, 1684.0),
        4: (10.1, 10.9, 11.2, 11.3, 11.4, 11.8, 14.5, 18.1, 27.5, 40.8, 61.5, 98.9, 172.3, 323.6, 612.7, 1180.7, 2308),
        8: (16.5, 17.9, 18.6, 19.0, 19.6, 19.5, 20.0, 25.8, 38.4, 50.9, 78.7, 121.8, 198.0, 321.5, 571.6, 1072.8, 2077),
    },
}
_OTHER_CARDS: dict[float, dict[int, tuple[float, ...]]] = {
    300e9: {
        2: (5.2, 5.2, 5.2, 5.5, 5.7, 6.6, 8.0, 10.7, 15.2, 25.2, 89.7, 126.3, 222.2, 388.5, 746.1, 1427.6, 2799),
        4: (5.5, 6.0, 6.0, 6.6, 7.8, 9.9, 14.5, 18.3, 26.0, 41.5, 118.0, 182.5, 288.1, 540.0, 996.3, 1920.7, 3721),
        8: (6.3, 6.5, 6.9, 8.4, 11.4, 17.1, 18.9, 21.7, 27.9, 45.4, 129.0, 214.2, 364.3, 594.2, 1160.9, 2170, 4223),
    },
    900e9: {
        2: (7.0, 7.0, 7.0, 7.1, 7.4, 7.7, 9.4, 13.1, 25.3, 33.7, 50.6, 57.4, 87.2, 155.1, 280.4, 528.6, 1004.7),
        4: (7.1, 7.4, 7.4, 7.4, 8.1, 8.6, 18.0, 18.4, 23.8, 30.0, 43.2, 68.0, 119.0, 187.4, 352.9, 680.6, 1291.2),
        8: (7.8, 8.1, 8.2, 8.6, 9.4, 17.2, 17.2, 17.2, 20.7, 26.3, 39.2, 63.2, 111.3, 222.8, 442.3, 715.0, 1337.4),
    },
}
# fmt: on
"""vLLM's on A100 and B200, by the bandwidth of their links, each no longer than of larger messages. Others take as much
longer there as vLLM's do; NCCL's tables show the like (eight B200: 1.3 to 1.7 times as long)."""
_SAME_KERNELS = {"flashinfer": "trtllm"}
_PAIR_LATENCY = {
    **{"nvswitch": 5e-6, "nvlink-bridge": 6e-6, "mesh": 5e-6, "pcie": 5.5e-6, "roce": 33e-6},
    **{"ib": 20e-6, "ethernet": 100e-6},  # estimates, 2026-11
}
_LINK_SHARE = {
    **{"nvswitch": 0.75, "nvlink-bridge": 0.75, "mesh": 0.6, "pcie": 0.55, "roce": 0.5},
    **{"ib": 0.8, "ethernet": 0.7},  # estimates, 2026-11
}


def all_reduce_seconds(size: float, ranks: int, link: Link, implementation: str) -> float:
    """Seconds of one all-reduce of `size` bytes inside a CUDA graph."""
    if ranks == 1 or size <= 0:
        return 0.0
    if link.inside is not None:
        inside = all_reduce_seconds(size, link.per_box, link.inside, implementation)
        between = replace(link, inside=None, per_box=1)
        return inside + all_reduce_seconds(size / link.per_box, -(-ranks // link.per_box), between, implementation)
    if link.kind == "nvswitch" and ranks <= 8:
        return _on_nvswitch(size, ranks, link.bandwidth, implementation)
    latency = _PAIR_LATENCY[link.kind] * (1 + 1.6 * log2(ranks / 2))
    return latency + 2 * (ranks - 1) / ranks * size / (_LINK_SHARE[link.kind] * link.bandwidth)


def hand_over_seconds(size: float, ranks: int, link: Link) -> float:
    """From the ranks of one stage to those of the next: each sends its part."""
    return _PAIR_LATENCY[link.kind] + size / ranks / (_LINK_SHARE[link.kind] * link.bandwidth)


def _on_nvswitch(size: float, ranks: int, bandwidth: float, implementation: str) -> float:
    """By the tables of the card whose links are nearest."""
    nearest = min((_TABLE_BANDWIDTH, *_OTHER_CARDS), key=lambda known: abs(log(known / bandwidth)))
    own = _MICROSECONDS[_SAME_KERNELS.get(implementation, implementation)]
    seconds = _looked_up(size, ranks, nearest / bandwidth, own)
    if nearest == _TABLE_BANDWIDTH:
        return seconds
    there, here = (_looked_up(size, ranks, 1.0, known) for known in (_OTHER_CARDS[nearest], _MICROSECONDS["vllm"]))
    return seconds * there / here


def _looked_up(size: float, ranks: int, slowdown: float, tables: dict[int, tuple[float, ...]]) -> float:
    """Between sizes and between rank counts, straight in logarithms; what bandwidth adds scales with the link's."""
    below = max(known for known in tables if known <= ranks)
    above = min(known for known in tables if known >= ranks)
    low, high = (_at_size(size, tables[known]) for known in (below, above))
    part = 0.0 if below == above else log(ranks / below) / log(above / below)
    floor = tables[below][0]
    time = low * (high / low) ** part
    return 1e-6 * (floor + max(0.0, time - floor) * slowdown)


def _at_size(size: float, times: tuple[float, ...]) -> float:
    if size <= _SIZES[0]:
        return times[0]
    index = min(bisect_right(_SIZES, size), len(_SIZES) - 1)
    low, high = _SIZES[index - 1], _SIZES[index]
    part = log(size / low) / log(high / low)
    return exp(log(times[index - 1]) * (1 - part) + log(times[index]) * part)
