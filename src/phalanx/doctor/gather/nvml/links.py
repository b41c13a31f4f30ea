"""NVLinks and paths. NVML tells each link's far end and each pair's PCIe path; NV18 is counted from both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from phalanx.doctor.facts import GpuPath, NvLink, P2pStatus, PathKind
from phalanx.doctor.gather.nvml.device import INVALID_ARGUMENT, NOT_SUPPORTED, Device

BusAddress = tuple[int, int, int]
_ACTIVE_STATES = {1, 2}
"""Active, and asleep until there is traffic. 3 is a link that is up and barred from traffic."""
_MOST_LINKS = 36
_SWITCH = 2
_SPEED, _SPEED_OF_ALL = 164, 90
_ERROR_FIELDS = (161, 162, 163)
"""Replays, recoveries, CRC errors."""
_ERROR_COUNTERS = range(4)
"""The same of older cards: replays, recoveries, CRC errors of control and of data."""
_VALUE_NAMES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_READ_ACCESS = 0
"""Not the binding's NVML_P2P_CAPS_INDEX_READ, which is a tuple by mistake."""
_KINDS: dict[int, PathKind] = {0: "pix", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
_STATUSES: dict[int, P2pStatus] = {
    0: "ok",
    1: "chipset",
    2: "gpu",
    3: "topology",
    4: "disabled",
    5: "unsupported",
    6: "unknown",
}


@dataclass(frozen=True)
class LinkEnd:
    """A link and what it leads to: a switch, or the device at an address."""

    link: NvLink
    to_switch: bool = False
    address: BusAddress | None = None


@dataclass(frozen=True)
class Station:
    """A GPU as a place that paths lead to. `ends` is `None` where its links could not be read."""

    device: Device
    address: BusAddress | None
    ends: tuple[LinkEnd, ...] | None


def address_of(pci: Any) -> BusAddress | None:
    return None if pci is None else (int(pci.domain), int(pci.bus), int(pci.device))


def read_links(device: Device) -> tuple[LinkEnd, ...] | None:
    """All links, also of cards that have fewer than the binding counts to."""
    ends = []
    for link in range(getattr(device.nvml, "NVML_NVLINK_MAX_LINKS", _MOST_LINKS)):
        try:
            state = device.nvml.nvmlDeviceGetNvLinkState(device.handle, link)
        except device.nvml.NVMLError as error:
            if error.value == INVALID_ARGUMENT:
                break
            if error.value == NOT_SUPPORTED:
                continue
            device.note("its NVLinks", error)
            return None
        ends.append(_end(device, link, state in _ACTIVE_STATES))
    return tuple(ends)


def _end(device: Device, link: int, active: bool) -> LinkEnd:
    if not active:
        return LinkEnd(NvLink(link, active=False))
    speed = _fields(device, [_SPEED], link) or _fields(device, [_SPEED_OF_ALL], 0)
    far = device.ask("what its NVLinks lead to", "nvmlDeviceGetNvLinkRemoteDeviceType", link)
    pci = device.ask("what its NVLinks lead to", "nvmlDeviceGetNvLinkRemotePciInfo", link)
    found = NvLink(link, active=True, gbs=speed[0] / 1000 if speed else None, errors=_errors(device, link))
    return LinkEnd(found, far == _SWITCH, address_of(pci))


def _errors(device: Device, link: int) -> int | None:
    counts = _fields(device, list(_ERROR_FIELDS), link)
    if counts is None:
        answers = [device.ask("link errors", "nvmlDeviceGetNvLinkErrorCounter", link, kind) for kind in _ERROR_COUNTERS]
        counts = None if None in answers else answers
    return None if counts is None else int(sum(counts))


def _fields(device: Device, ids: list[int], link: int) -> list[float] | None:
    """The values of these fields, or nothing where one is missing."""
    answers = device.ask("link fields", "nvmlDeviceGetFieldValues", [(number, link) for number in ids])
    if answers is None or any(answer.nvmlReturn or answer.valueType not in _VALUE_NAMES for answer in answers):
        return None
    return [getattr(answer.value, _VALUE_NAMES[answer.valueType]) for answer in answers]


def read_paths(stations: Mapping[int, Station], asked: Device) -> tuple[GpuPath, ...]:
    """Between every two GPUs: the NVLinks that join them, else the PCIe path, and whether one may read the other."""
    paths = []
    for (a, one), (b, other) in combinations(stations.items(), 2):
        pair = f"GPU {a} and GPU {b}"
        links = _links_between(one, other)
        common = asked.ask(
            f"the path of {pair}", "nvmlDeviceGetTopologyCommonAncestor", one.device.handle, other.device.handle
        )
        kind = "nvlink" if links else _KINDS.get(common)
        access = asked.ask(
            f"peer access of {pair}", "nvmlDeviceGetP2PStatus", one.device.handle, other.device.handle, _READ_ACCESS
        )
        if kind is not None:
            paths.append(GpuPath(a, b, kind, links, _STATUSES.get(access)))
    return tuple(paths)


def _links_between(one: Station, other: Station) -> int:
    """Links that lead straight to the other, or as many as both have to the switches."""
    ends, others = ([end for end in station.ends or () if end.link.active] for station in (one, other))
    direct = sum(not end.to_switch and end.address is not None and end.address == other.address for end in ends)
    return direct or min(sum(end.to_switch for end in ends), sum(end.to_switch for end in others))
