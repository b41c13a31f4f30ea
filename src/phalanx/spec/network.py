"""Links: how ranks reach each other inside a box, and the networks between boxes."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from phalanx.errors import PhalanxError

LinkKind = Literal["nvswitch", "nvlink-bridge", "mesh", "pcie", "roce", "ib", "ethernet"]


class MachineError(PhalanxError):
    """The machine is written wrongly or cannot exist."""


@dataclass(frozen=True)
class Link:
    """How ranks reach each other: bytes per second one way per GPU. Between boxes of `per_box` ranks each, those of a
    box first reduce over the link `inside`, and each sends its part.
    """

    kind: LinkKind
    bandwidth: float
    inside: Link | None = None
    per_box: int = 1


@dataclass(frozen=True)
class Network:
    """What joins boxes. `ports`: how many a box has at most, one for each GPU up to that."""

    name: str
    kind: LinkKind
    port_bandwidth: float
    ports: int
    source: str

    def link(self, inside: Link, per_box: int) -> Link:
        """Between boxes of so many GPUs."""
        shared = self.port_bandwidth * min(self.ports, per_box) / per_box
        return Link(self.kind, shared, inside if per_box > 1 else None, per_box)


NETWORKS = {
    network.name: network
    for network in (
        Network("ib-ndr", "ib", 50e9, 8, "400 Gb/s a port, a port a GPU as in HGX reference designs; memory, 2026-11"),
        Network("roce-200", "roce", 23.7e9, 8, "189.85 Gb/s measured by the dgx-spark-playbooks' perf guide"),
        Network("10gbe", "ethernet", 1.25e9, 1, "10 Gb/s, one port a box"),
    )
}


def network(name: str) -> Network:
    """The network of this name, or a refusal that names the nearest."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    if plain in NETWORKS:
        return NETWORKS[plain]
    near = difflib.get_close_matches(plain, NETWORKS, n=1, cutoff=0.3)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise MachineError("unknown_network", f"No network is called {name!r}.", f"{meant}Known: {', '.join(NETWORKS)}.")
