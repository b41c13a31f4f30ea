"""Brings a cluster up and takes it down."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.cluster import commands
from phalanx.cluster.hosts import Cluster, Node
from phalanx.cluster.node import Member, Probe, Stopped
from phalanx.cluster.remote import ClusterError, ask, attempt_all, joined_error, on_all, run
from phalanx.version import install_command

Say = Callable[[Node, str], None]
"""Told what happened on which node, as it happens; from several threads."""


def up(cluster: Cluster, say: Say) -> list[str]:
    """Start Ray on every node that is not in the cluster yet; on failure, stop what was started. Returns warnings."""
    token = make_token(cluster.token_file)
    probes = on_all(lambda node: ask(cluster, commands.probe(node), Probe), cluster.nodes)
    for node, probe in zip(cluster.nodes, probes, strict=True):
        say(node, f"python {probe.python}, phalanx {probe.phalanx}, ray {probe.ray}, {link_of(probe)}")
    _check(cluster, probes)
    starting = _nodes_to_start(cluster, probes)
    for node in cluster.nodes:
        if node not in starting:
            say(node, "is up already")
    try:
        if starting:
            _start_all(cluster, starting, token, say)
    except BaseException:
        attempt_all(lambda node: _stop(cluster, node, say), starting)
        raise
    return warnings(cluster, probes)


def down(cluster: Cluster, say: Say) -> None:
    """Stop this cluster's Ray on every node that can be reached, and tell which could not."""
    _, errors = attempt_all(lambda node: _stop(cluster, node, say), cluster.workers)
    _, more = attempt_all(lambda node: _stop(cluster, node, say), [cluster.head])
    if errors or more:
        raise joined_error([*more, *errors])


def make_token(path: Path) -> str:
    """The token in this file, which only its owner may read; a new one if there is no such file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        pass
    except OSError as error:
        raise ClusterError(
            "bad_token", f"{path} cannot be written ({error.strerror}).", "Write another token_file in hosts.toml."
        ) from None
    return _read_token(path)


def _read_token(path: Path) -> str:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ClusterError("bad_token", f"Others may read {path} (mode {mode:o}).", f"chmod 600 {path}")
    token = path.read_text().strip()
    if not token or any(character.isspace() for character in token):
        raise ClusterError("bad_token", f"{path} holds no token.", "Remove it: the next up makes a new one.")
    return token


def link_of(probe: Probe) -> str:
    if probe.nic is None:
        return "no such interface"
    speed = f"{probe.nic.speed_mbps / 1000:g} Gb/s" if probe.nic.speed_mbps else "speed unknown"
    return f"{probe.nic.name} {speed} MTU {probe.nic.mtu}"


def _nodes_to_start(cluster: Cluster, probes: Sequence[Probe]) -> list[Node]:
    """Nodes that the head does not know. What is left there of an earlier start or of a lost head is ended."""
    left = [node for node, probe in zip(cluster.nodes, probes, strict=True) if probe.processes]
    known: set[str] = set()
    if probes[0].address is not None:
        known = {member.ip for member in ask(cluster, commands.members(cluster), list[Member])}
    on_all(lambda node: run(cluster, commands.stop(node)), [node for node in left if node.ip not in known])
    return [node for node in cluster.nodes if node.ip not in known]


def _start_all(cluster: Cluster, nodes: Sequence[Node], token: str, say: Say) -> None:
    def start(node: Node) -> None:
        run(cluster, commands.start(cluster, node))
        say(node, "Ray started" + (", the head" if node.is_head else ""))

    on_all(lambda node: run(cluster, commands.hand_token(node), token), nodes)
    on_all(start, [node for node in nodes if node.is_head])
    on_all(start, [node for node in nodes if not node.is_head])
    run(cluster, commands.joined(cluster))


def _stop(cluster: Cluster, node: Node, say: Say) -> None:
    stopped = ask(cluster, commands.stop(node), Stopped)
    say(node, f"stopped, {stopped.ended} processes" if stopped.ended else "was not up")


def _check(cluster: Cluster, probes: Sequence[Probe]) -> None:
    problems = [*_differing_versions(cluster, probes)]
    for node, probe in zip(cluster.nodes, probes, strict=True):
        problems += _problems(cluster, node, probe)
    if problems:
        raise joined_error(problems)


def _differing_versions(cluster: Cluster, probes: Sequence[Probe]) -> list[ClusterError]:
    """Ray and Phalanx talk to their own kind only, and Ray wants one Python."""
    problems = []
    for what in ("python", "phalanx", "ray"):
        found = [getattr(probe, what) for probe in probes]
        if len(set(found)) > 1:
            each = ", ".join(f"{node.name} {version}" for node, version in zip(cluster.nodes, found, strict=True))
            fix = f"Install {what} {found[0]} on every node, as on the head."
            problems.append(ClusterError("versions_differ", f"{what} differs: {each}.", fix))
    return problems


def _problems(cluster: Cluster, node: Node, probe: Probe) -> list[ClusterError]:
    problems = []
    if probe.ray is None:
        fix = f"On {node.host}: {node.python} -m {install_command('cluster')}"
        problems.append(ClusterError("not_installed", f"{node.name} has no Ray.", fix))
    if probe.nic is None or not probe.nic.up:
        state = "is down" if probe.nic else "does not exist"
        fix = "Check the cable (ip -br link) and the interface in hosts.toml."
        problems.append(ClusterError("bad_interface", f"{node.name}: interface {node.interface} {state}.", fix))
    elif node.interface != "lo" and node.ip not in probe.nic.addresses:
        has = ", ".join(probe.nic.addresses) or "no address"
        fix = "Correct ip in hosts.toml, or the address with netplan."
        problems.append(ClusterError("bad_address", f"{node.name}: {node.interface} has {has}.", fix))
    if len(probe.gpus) < node.gpus:
        fix = "Correct gpus in hosts.toml, or run phalanx doctor there."
        found = f"{node.name} has {len(probe.gpus)} GPUs, hosts.toml says {node.gpus}."
        problems.append(ClusterError("too_few_gpus", found, fix))
    if probe.address not in (None, cluster.address):
        fix = f"End it with the hosts.toml it was started with, or choose another folder than {node.folder}."
        found = f"{node.name}: Ray of another cluster ({probe.address}) runs in {node.folder}."
        problems.append(ClusterError("other_cluster", found, fix))
    return problems


def warnings(cluster: Cluster, probes: Sequence[Probe]) -> list[str]:
    """What works, but slower than it should: unlike links, and the default MTU."""
    links = {node.name: probe.nic for node, probe in zip(cluster.nodes, probes, strict=True) if probe.nic}
    told = []
    for what, unit in (("mtu", ""), ("speed_mbps", " Mb/s")):
        found = {name: getattr(nic, what) for name, nic in links.items()}
        if len(set(found.values())) > 1:
            each = ", ".join(f"{name} {value}{unit}" for name, value in found.items())
            told.append(f"{what.split('_')[0]} differs: {each}. The lowest bounds all.")
    if any(nic.mtu == 1500 for nic in links.values()):
        told.append("MTU is 1500: set 9000 on every node and on the switch; RoCE then sends 4096 bytes at a time.")
    return told
