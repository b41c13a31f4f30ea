"""Which machine of a cluster runs which rank. No Ray in here: nodes in, resources and an order of ranks out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import ConfigError

_PINNED = 0.001
"""How much of a node's own resource a bundle asks for, so that it can only go there."""


@dataclass(frozen=True)
class RayNode:
    """A machine of the cluster, with its GPUs and CPU slots in all, and those that are free now."""

    id: str
    address: str
    hostname: str
    gpus: int
    cpus: int
    free_gpus: int
    free_cpus: int

    @property
    def name(self) -> str:
        return f"{self.hostname} ({self.address})"


@dataclass(frozen=True)
class Wanted:
    """`ranks` ranks on GPUs or CPUs, the first on the driver's node, `per_node` on each or as many as it has GPUs."""

    ranks: int
    on_gpus: bool
    per_node: int | None

    @property
    def resource(self) -> str:
        return "GPU" if self.on_gpus else "CPU"

    def slots(self, node: RayNode) -> int:
        """How many ranks a node could run if nobody else used it."""
        has = node.gpus if self.on_gpus else node.cpus
        if self.per_node is not None:
            return self.per_node if has >= self.per_node else 0
        return has if self.on_gpus else min(has, 1)


def driver_first(nodes: Sequence[RayNode], driver: str) -> list[RayNode]:
    return sorted(nodes, key=lambda node: (node.id != driver, _by_number(node.address), node.id))


def _by_number(address: str) -> tuple[tuple[bool, int, str], ...]:
    return tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in address.split("."))


def check_room(wanted: Wanted, nodes: Sequence[RayNode], driver: str) -> None:
    """ConfigError if the cluster has no room for the ranks, with what each node has.

    Two nodes at one address are one that died and one that came in its place, or machines that hide behind the same
    address: ranks cannot be told where to go.
    """
    twice = [address for address, count in Counter(node.address for node in nodes).items() if count > 1]
    if twice:
        raise ConfigError(
            "same_address",
            f"Several Ray nodes have the address {twice[0]}.",
            "Give each its own with `ray start --node-ip-address`; one that died is forgotten within a minute.",
        )
    if sum(wanted.slots(node) for node in nodes) < wanted.ranks:
        raise too_small(wanted, nodes)
    here = next((node for node in nodes if node.id == driver), None)
    if here is None or not wanted.slots(here):
        raise ConfigError(
            "no_room_here",
            f"Rank 0 runs on this machine, which offers the cluster no {wanted.resource} for it: {_told(nodes)}.",
            "Start the server on a node that has one.",
        )


def too_small(wanted: Wanted, nodes: Sequence[RayNode]) -> ConfigError:
    each = f", {wanted.per_node} on each node" if wanted.per_node is not None else ""
    each = each or ("" if wanted.on_gpus else ", one on each node")
    return ConfigError(
        "cluster_too_small",
        f"{wanted.ranks} ranks need {wanted.ranks} {wanted.resource}s{each}; the cluster has {_told(nodes)}.",
        "Use a smaller tp, let more nodes join, or free them: `ray status` shows who holds what.",
    )


def _told(nodes: Sequence[RayNode]) -> str:
    def of(node: RayNode) -> str:
        return f"{node.name}: {node.free_gpus} of {node.gpus} GPUs and {node.free_cpus} of {node.cpus} CPUs free"

    return "; ".join(map(of, nodes)) or "no node"


def bundles(wanted: Wanted, nodes: Sequence[RayNode], driver: str) -> list[dict[str, float]]:
    """What to reserve, one bundle a rank. The first is pinned to the driver's node.

    With a number of ranks a node, and on CPUs, all are pinned; else Ray packs them.
    """
    ordered = driver_first(nodes, driver)
    if wanted.on_gpus and wanted.per_node is None:
        rest = [{"GPU": 1.0} for _ in range(wanted.ranks - 1)]
        return [_pinned(wanted, ordered[0]), *rest]
    places = [node for node in ordered for _ in range(wanted.slots(node))]
    return [_pinned(wanted, node) for node in places[: wanted.ranks]]


def _pinned(wanted: Wanted, node: RayNode) -> dict[str, float]:
    return {wanted.resource: 1.0, f"node:{node.address}": _PINNED}


def bundle_of_each_rank(node_of_bundle: Mapping[int, str], nodes: Sequence[RayNode], driver: str) -> list[int]:
    """Bundles in the order of ranks: the driver's node first, and the ranks of a node side by side.

    Ray may put bundles in any order on the nodes it chose.
    """
    order = {node.id: index for index, node in enumerate(driver_first(nodes, driver))}
    return sorted(node_of_bundle, key=lambda bundle: (order[node_of_bundle[bundle]], bundle))
