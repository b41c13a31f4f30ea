"""hosts.toml: which machines make a cluster, and how to reach them."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from phalanx.errors import ConfigError

LOCAL = "local"
"""The host of a node that runs on this machine, without ssh."""
DEFAULT_PORT = 6379
DEFAULT_FOLDER = "/tmp/phalanx-cluster"
LONGEST_FOLDER = 42
"""Of Ray's files: it makes sockets of 65 more characters there, and a socket's path ends at 107."""

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)


class _ClusterTable(msgspec.Struct, frozen=True):
    python: str = ""
    interface: str = ""
    port: int = DEFAULT_PORT
    user: str = ""
    network: str = ""
    folder: str = DEFAULT_FOLDER
    token_file: str = ""
    ssh_config: str = ""
    rdma: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class _NodeTable(msgspec.Struct, frozen=True):
    host: str = ""
    ip: str = ""
    interface: str = ""
    head: bool = False
    gpus: int | None = None
    ranks: int | None = None
    python: str = ""
    rdma: tuple[str, ...] = ()
    environment: dict[str, str] = {}


@dataclass(frozen=True)
class Node:
    """One machine: how to reach it, its address on the fast network, and what Ray gets there."""

    host: str
    ip: str
    interface: str
    is_head: bool
    gpus: int
    ranks: int
    """Ranks on the CPU; 0 where there are GPUs."""
    python: str
    folder: str
    """For the token and Ray's files; no other node of the cluster has this folder."""
    rdma: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def is_local(self) -> bool:
        return self.host == LOCAL

    @property
    def name(self) -> str:
        return f"{self.host} ({self.ip})"

    @property
    def slots(self) -> int:
        """Ranks that have room here."""
        return self.gpus or self.ranks

    @property
    def token_path(self) -> str:
        return f"{self.folder}/token"

    @property
    def ray_folder(self) -> str:
        """Ray opens its own folder to all users, so it lies in one that is not."""
        return f"{self.folder}/ray"


@dataclass(frozen=True)
class Cluster:
    """The machines in rank order: the head, then by address."""

    nodes: tuple[Node, ...]
    port: int
    user: str
    token_file: Path
    ssh_config: Path | None

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def workers(self) -> tuple[Node, ...]:
        return self.nodes[1:]

    @property
    def address(self) -> str:
        return f"{self.head.ip}:{self.port}"

    def ranks(self, tp: int | None = None) -> dict[str, list[int]]:
        """By address, the ranks that land there: the head's first, then node by node, until `tp` are placed."""
        placed: dict[str, list[int]] = {}
        first, most = 0, tp if tp is not None else sum(node.slots for node in self.nodes)
        for node in self.nodes:
            placed[node.ip] = list(range(first, min(first + node.slots, most)))
            first += len(placed[node.ip])
        return placed


def read_hosts(path: Path) -> Cluster:
    """The cluster a file describes; the first mistake in it is refused with what to write instead."""
    try:
        return parse_hosts(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise _wrong(path, f"it cannot be read ({error.strerror})", "Name the cluster's hosts.toml.") from None
    except UnicodeDecodeError:
        raise _wrong(path, "it is not UTF-8 text", "Name the cluster's hosts.toml.") from None


def parse_hosts(text: str, path: Path) -> Cluster:
    """As `read_hosts`; relative paths in the text start at the folder of `path`."""
    try:
        told = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(path, f"it is not TOML ({error})", "Correct that place.") from None
    _check_keys(path, "the file", told, ("cluster", "node"))
    table = _converted(path, "[cluster]", told.get("cluster", {}), _ClusterTable)
    entries = told.get("node", [])
    if not isinstance(entries, list) or not entries:
        raise _wrong(path, "it names no node", "Write a [[node]] with host, ip and gpus for every machine.")
    nodes = [
        _node(path, f"[[node]] {number}", _converted(path, f"[[node]] {number}", entry, _NodeTable), table)
        for number, entry in enumerate(entries, 1)
    ]
    _check_cluster(path, table, nodes)
    return Cluster(
        nodes=tuple(sorted(nodes, key=lambda node: (not node.is_head, IPv4Address(node.ip)))),
        port=table.port,
        user=table.user,
        token_file=_near(path, table.token_file or f"~/.config/phalanx/{path.stem}.token"),
        ssh_config=_near(path, table.ssh_config) if table.ssh_config else None,
    )


def _wrong(path: Path, found: str, fix: str) -> ConfigError:
    return ConfigError("bad_hosts", f"{path}: {found}.", fix)


def _near(path: Path, name: str) -> Path:
    return path.absolute().parent / Path(name).expanduser()


def _check_keys(path: Path, where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.4)
            suggestion = f"Did you mean {near[0]}? " if near else ""
            raise _wrong(path, f"{where} has an unknown key {key!r}", f"{suggestion}Known: {', '.join(known)}.")


def _converted(path: Path, where: str, table: Any, kind: type[Any]) -> Any:
    if not isinstance(table, dict):
        raise _wrong(path, f"{where} is not a table", "Write [cluster] once and [[node]] for every machine.")
    _check_keys(path, where, table, kind.__struct_fields__)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        key = place.rstrip("`") or "an entry"
        raise _wrong(path, f"{where}: {key} is wrong ({what})", f"Correct {key}.") from None


def _node(path: Path, where: str, entry: _NodeTable, table: _ClusterTable) -> Node:
    if not entry.host:
        raise _wrong(path, f"{where} has no host", 'Write the name ssh knows, or host = "local" for this machine.')
    if not _HOST.fullmatch(entry.host):
        raise _wrong(path, f"{where}: {entry.host!r} is no host name", "Write the name or address that ssh knows.")
    if (entry.gpus or 0) < 1 and (entry.ranks or 0) < 1:
        raise _wrong(path, f"{where} has room for no rank", "Write gpus = 1 (or more), or ranks = 1 for the CPU.")
    if entry.gpus and entry.ranks:
        raise _wrong(path, f"{where} has both gpus and ranks", "Write gpus, or ranks for a machine without GPUs.")
    node = Node(
        host=entry.host,
        ip=_address(path, where, entry.ip),
        interface=_interface(path, where, entry.interface or table.interface),
        is_head=entry.head,
        gpus=entry.gpus or 0,
        ranks=entry.ranks or 0,
        python=_absolute(path, where, "python", entry.python or table.python, "/opt/phalanx/bin/python"),
        folder=f"{_absolute(path, '[cluster]', 'folder', table.folder, DEFAULT_FOLDER)}/{entry.ip}",
        rdma=entry.rdma or table.rdma,
        environment=_variables(path, where, {**table.environment, **entry.environment}),
    )
    excess = len(node.ray_folder) - LONGEST_FOLDER
    if excess > 0:
        most = len(table.folder) - excess
        raise _wrong(
            path,
            f"{node.ray_folder} is {len(node.ray_folder)} characters long, and Ray's sockets allow {LONGEST_FOLDER}",
            f"Use a folder of {most} characters at most, such as {DEFAULT_FOLDER}.",
        )
    for device in node.rdma:
        _interface(path, f"{where}, rdma", device)
    return node


def _address(path: Path, where: str, ip: str) -> str:
    try:
        address = IPv4Address(ip)
    except ValueError:
        found = f"{where}: ip {ip!r} is no IPv4 address" if ip else f"{where} has no ip"
        raise _wrong(path, found, "Write its address on the fast network, such as 192.168.100.10.") from None
    if str(address) == "127.0.0.1":
        raise _wrong(
            path,
            f"{where}: Ray replaces 127.0.0.1 by another address",
            "Use the address on the fast network, or 127.0.0.2 to try it on one machine.",
        )
    return ip


def _interface(path: Path, where: str, name: str) -> str:
    if not name:
        raise _wrong(path, f"{where} has no interface", "Write interface under [cluster] or [[node]]; see ip -br addr.")
    if not _INTERFACE.fullmatch(name):
        raise _wrong(path, f"{where}: {name!r} is no interface name", "Write one that ip -br addr shows.")
    return name


def _absolute(path: Path, where: str, key: str, value: str, example: str) -> str:
    if not value:
        raise _wrong(path, f"{where} has no {key}", f'Write {key} = "{example}" under [cluster].')
    if not PurePosixPath(value).is_absolute() or "\n" in value:
        raise _wrong(path, f"{where}: {key} {value!r} is no absolute path", f"Write it in full, such as {example}.")
    return value.rstrip("/")


def _variables(path: Path, where: str, environment: dict[str, str]) -> dict[str, str]:
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name) or "\n" in value or "\0" in value:
            raise _wrong(path, f"{where}: {name!r} is no environment variable", "Use letters, digits and underscores.")
        if _SECRET.search(name):
            raise _wrong(
                path,
                f"{where}: {name} looks like a secret, and the environment is on a command line all users see",
                "Keep it in a file on the node that only the user can read.",
            )
    return environment


def _check_cluster(path: Path, table: _ClusterTable, nodes: list[Node]) -> None:
    heads = [node.name for node in nodes if node.is_head]
    if not heads:
        raise _wrong(path, "no node is the head", "Write head = true in the node that will serve.")
    if len(heads) > 1:
        raise _wrong(path, f"{' and '.join(heads)} are both heads", "Leave head = true in one node.")
    for ip, count in Counter(node.ip for node in nodes).items():
        if count > 1:
            raise _wrong(path, f"{count} nodes have the ip {ip}", "Every node needs its own address.")
    for host, count in Counter(node.host for node in nodes if not node.is_local).items():
        if count > 1:
            raise _wrong(path, f"{count} nodes have the host {host}", "Write each machine once, with all its GPUs.")
    if len({(node.gpus > 0, node.ranks) for node in nodes}) > 1:
        told = ", ".join(f"{node.name} {f'{node.gpus} GPUs' if node.gpus else f'{node.ranks} ranks'}" for node in nodes)
        raise _wrong(
            path,
            f"the ranks of one model run all on GPUs, or on CPUs with as many on each node, but there are {told}",
            "Write gpus everywhere, or the same ranks everywhere.",
        )
    if not 1 <= table.port <= 65535:
        raise _wrong(path, f"port is {table.port}", f"Use 1 to 65535, such as {DEFAULT_PORT}.")
    if table.user and not _USER.fullmatch(table.user):
        raise _wrong(path, f"{table.user!r} is no user name", "Write the user that ssh logs in as.")
    _check_network(path, table.network, nodes)


def _check_network(path: Path, network: str, nodes: list[Node]) -> None:
    head = next(node for node in nodes if node.is_head)
    try:
        subnet = IPv4Network(network or f"{head.ip}/24", strict=False)
    except ValueError:
        raise _wrong(path, f"network {network!r} is no subnet", "Write it as 192.168.100.0/24.") from None
    for node in nodes:
        if IPv4Address(node.ip) not in subnet:
            raise _wrong(
                path,
                f"{node.name} is not in {subnet}, the subnet of the head",
                "Give every node an address of one subnet, or write network under [cluster] if it is larger.",
            )
