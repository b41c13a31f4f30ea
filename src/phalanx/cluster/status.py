"""What a cluster looks like now: every node, its link, its GPUs, and the ranks that land there."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from rich.table import Table

from phalanx.cluster import commands
from phalanx.cluster.control import link_of
from phalanx.cluster.hosts import Cluster, Node
from phalanx.cluster.node import Member, Probe
from phalanx.cluster.remote import ClusterError, ask, attempt_all

NodeState = Literal["up", "down", "cut off", "other cluster", "unreachable"]
"""Cut off: Ray runs there, but the head does not count it."""


class NodeStatus(Struct, frozen=True):
    """One node. `ranks` are those that land there; `probe` is missing where it did not answer, for this `problem`."""

    host: str
    ip: str
    is_head: bool
    state: NodeState
    ranks: tuple[int, ...]
    probe: Probe | None = None
    problem: str | None = None


class Status(Struct, frozen=True):
    """All nodes in rank order; `problem` says why Ray could not be asked."""

    address: str
    nodes: tuple[NodeStatus, ...]
    problem: str | None = None

    @property
    def is_up(self) -> bool:
        return all(node.state == "up" for node in self.nodes)


def status(cluster: Cluster, tp: int | None = None) -> Status:
    """Ask every node, and the head for the nodes it counts. Nodes that do not answer are part of the answer."""

    def look(node: Node) -> tuple[Probe | None, str | None]:
        try:
            return ask(cluster, commands.probe(node), Probe), None
        except ClusterError as error:
            return None, str(error)

    looked, _ = attempt_all(look, cluster.nodes)
    known, problem = _known(cluster, looked[0][0])
    placed = cluster.ranks(tp)
    nodes = tuple(
        NodeStatus(
            host=node.host,
            ip=node.ip,
            is_head=node.is_head,
            state=_state(cluster, node, probe, known),
            ranks=tuple(placed[node.ip]),
            probe=probe,
            problem=found,
        )
        for node, (probe, found) in zip(cluster.nodes, looked, strict=True)
    )
    return Status(cluster.address, nodes, problem)


def _known(cluster: Cluster, head: Probe | None) -> tuple[set[str], str | None]:
    if head is None or head.address is None:
        return set(), None
    try:
        return {member.ip for member in ask(cluster, commands.members(cluster), list[Member])}, None
    except ClusterError as error:
        return set(), str(error)


def _state(cluster: Cluster, node: Node, probe: Probe | None, known: set[str]) -> NodeState:
    if probe is None:
        return "unreachable"
    if probe.address is None:
        return "down"
    if probe.address != cluster.address:
        return "other cluster"
    return "up" if node.ip in known else "cut off"


def table(status: Status) -> Table:
    """For people."""
    shown = Table(title=f"Ray at {status.address}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("node", "ip", "state", "GPUs", "link", "phalanx", "ray", "ranks"):
        shown.add_column(column, overflow="fold")
    for node in status.nodes:
        mark = "[green]up[/]" if node.state == "up" else f"[red]{node.state}[/]"
        probe = node.probe
        shown.add_row(
            node.host + (", head" if node.is_head else ""),
            node.ip,
            mark,
            _gpus(probe) if probe else "",
            link_of(probe) if probe else "",
            probe.phalanx if probe else "",
            (probe.ray or "missing") if probe else "",
            _ranks(node.ranks),
        )
    return shown


def _gpus(probe: Probe) -> str:
    names = dict.fromkeys(probe.gpus)
    return ", ".join(f"{probe.gpus.count(name)} x {name}" for name in names) or "none"


def _ranks(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
