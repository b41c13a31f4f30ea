"""Every command a cluster is made of, word for word, and how each reaches its node."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.cluster.hosts import Cluster, Node
from phalanx.plan.recipes.fabric import fabric_environment

MARK = "PHALANX_CLUSTER_NODE"
"""Set to the node's folder for all of its Ray processes, which hand it on to their children: so they are known."""
CONNECT_TIMEOUT_S = 10
JOIN_PATIENCE_S = 90
"""How long nodes may take to appear in the cluster once Ray has started on them."""
_OBJECT_STORE_BYTES = 256 * 2**20
"""Phalanx sends no tensor through Ray; by default Ray would keep 30 % of the memory for that."""


@dataclass(frozen=True)
class Command:
    """One command on one node. `takes_token`: it reads the token from standard input."""

    node: Node
    what: str
    words: tuple[str, ...]
    takes_token: bool = False
    timeout_s: float = 60


def argv(cluster: Cluster, command: Command) -> list[str]:
    """What is run here: the words themselves, or ssh with the words quoted for the shell on the other side."""
    if command.node.is_local:
        return list(command.words)
    words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"]
    words += ["-o", "ServerAliveInterval=15"]
    if cluster.ssh_config is not None:
        words += ["-F", str(cluster.ssh_config)]
    if cluster.user:
        words += ["-l", cluster.user]
    return [*words, "--", command.node.host, shlex.join(command.words)]


def shown(cluster: Cluster, command: Command) -> str:
    """The command as a line for a shell; the token is named, never shown."""
    line = shlex.join(argv(cluster, command))
    return f"{line} < {shlex.quote(str(cluster.token_file))}" if command.takes_token else line


def auth_environment(node: Node) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": node.token_path}


def ray_environment(node: Node) -> dict[str, str]:
    """All that Ray and its workers are started with. Ray's memory monitor would kill ranks whose weights are in RAM."""
    return {
        MARK: node.folder,
        **auth_environment(node),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        **fabric_environment(node.interface, node.rdma),
        **node.environment,
    }


def ray_start(cluster: Cluster, node: Node, block: bool = False) -> list[str]:
    """`ray start` of a node; the head serves no dashboard. `block`: stay in the foreground, as systemd likes it."""
    words = [node.python, "-m", "ray.scripts.scripts", "start"]
    if node.is_head:
        words += ["--head", "--port", str(cluster.port), "--include-dashboard", "false", "--disable-usage-stats"]
    else:
        words += ["--address", cluster.address]
    words += ["--node-ip-address", node.ip, "--num-gpus", str(node.gpus)]
    if node.ranks:
        words += ["--num-cpus", str(node.ranks)]
    words += ["--object-store-memory", str(_OBJECT_STORE_BYTES), "--temp-dir", node.ray_folder]
    return [*words, "--block"] if block else words


def wait_for_all(cluster: Cluster, patience_s: float) -> list[str]:
    """Run on the head: ends well once every node has joined."""
    return [*_members(cluster), "--patience", f"{patience_s:g}", "--expect", *(node.ip for node in cluster.nodes)]


def _members(cluster: Cluster) -> list[str]:
    return [cluster.head.python, "-m", "phalanx.cluster.node", "members", "--address", cluster.address]


def serve_options(cluster: Cluster) -> list[str]:
    """What `phalanx serve` needs to know to put its ranks on this cluster."""
    options = ["--executor", "ray", "--ray-address", cluster.address, "--interface", cluster.head.interface]
    ranks = cluster.head.ranks
    return [*options, "--ranks-per-node", str(ranks)] if ranks else options


def serve_environment(cluster: Cluster) -> dict[str, str]:
    """The variables of the process on the head that serves: rank 0 is there, and Ray asks it for the token."""
    head = cluster.head
    return {**auth_environment(head), **fabric_environment(head.interface, head.rdma), **head.environment}


def probe(node: Node) -> Command:
    words = [node.python, "-m", "phalanx.cluster.node", "probe", "--interface", node.interface, "--folder", node.folder]
    return Command(node, "look at the machine, its versions and its link", _with(node.environment, words))


def hand_token(node: Node) -> Command:
    words = [node.python, "-m", "phalanx.cluster.node", "token", "--folder", node.folder]
    return Command(node, "hand over the token", _with(node.environment, words), takes_token=True)


def start(cluster: Cluster, node: Node) -> Command:
    what = "start Ray, the head" if node.is_head else "start Ray and join the head"
    return Command(node, what, _with(ray_environment(node), ray_start(cluster, node)), timeout_s=180)


def members(cluster: Cluster) -> Command:
    return Command(cluster.head, "ask Ray for its nodes", _with(_client(cluster), _members(cluster)), timeout_s=120)


def joined(cluster: Cluster) -> Command:
    words = _with(_client(cluster), wait_for_all(cluster, JOIN_PATIENCE_S))
    return Command(cluster.head, "wait until all nodes have joined", words, timeout_s=120 + JOIN_PATIENCE_S)


def _client(cluster: Cluster) -> dict[str, str]:
    return {**auth_environment(cluster.head), **cluster.head.environment}


def stop(node: Node) -> Command:
    words = [node.python, "-m", "phalanx.cluster.node", "stop", "--folder", node.folder]
    return Command(node, "stop this cluster's Ray processes", _with(node.environment, words), timeout_s=90)


def commands_of_up(cluster: Cluster) -> list[Command]:
    """All that `up` runs where nothing runs yet, in order."""
    return [
        *(probe(node) for node in cluster.nodes),
        *(hand_token(node) for node in cluster.nodes),
        *(start(cluster, node) for node in cluster.nodes),
        joined(cluster),
    ]


def commands_of_down(cluster: Cluster) -> list[Command]:
    """Workers first: a worker whose head is gone would look for it."""
    return [stop(node) for node in (*cluster.workers, cluster.head)]


def _with(environment: Mapping[str, str], words: list[str]) -> tuple[str, ...]:
    return ("env", *(f"{name}={value}" for name, value in environment.items()), *words)
