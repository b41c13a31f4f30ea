"""The commands of a cluster, word for word, and as a dry run prints them."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.cluster.commands import Command, argv, commands_of_up, fabric_environment, ray_start, serve_options, shown
from phalanx.cluster.hosts import parse_hosts

HOSTS = """
[cluster]
interface = "cx0"
rdma = ["roce0", "roce1"]
user = "op"
python = "/opt/phalanx/bin/python"
folder = "/var/lib/phalanx"
token_file = "/home/op/my token"
ssh_config = "ssh.conf"

[[node]]
host = "local"
ip = "10.0.0.1"
head = true
gpus = 1

[[node]]
host = "beta"
ip = "10.0.0.2"
gpus = 1
environment = { GREETING = "it's $HOME" }
"""
PYTHON = "/opt/phalanx/bin/python"
SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -F /etc/ssh.conf -l op -- beta "
FABRIC = (
    "NCCL_SOCKET_IFNAME=cx0 GLOO_SOCKET_IFNAME=cx0 TP_SOCKET_IFNAME=cx0 UCX_NET_DEVICES=cx0 "
    "OMPI_MCA_btl_tcp_if_include=cx0 NCCL_IB_DISABLE=0 NCCL_IB_HCA=roce0,roce1 "
    "NCCL_IB_GID_INDEX=3 NCCL_IB_SUBNET_AWARE_ROUTING=1"
)
QUIET = "RAY_USAGE_STATS_ENABLED=0 RAY_memory_monitor_refresh_ms=0"


def ray_variables(ip: str) -> str:
    folder = f"/var/lib/phalanx/{ip}"
    auth = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={folder}/token"
    return f"PHALANX_CLUSTER_NODE={folder} {auth} {QUIET} {FABRIC}"


def remote(words: str) -> str:
    return SSH + shlex.quote(words)


GREETING = "'GREETING=it'\"'\"'s $HOME'"
EXPECTED_UP = [
    "# local (10.0.0.1): look at the machine, its versions and its link",
    f"env {PYTHON} -m phalanx.cluster.node probe --interface cx0 --folder /var/lib/phalanx/10.0.0.1",
    "# beta (10.0.0.2): look at the machine, its versions and its link",
    remote(f"env {GREETING} {PYTHON} -m phalanx.cluster.node probe --interface cx0 --folder /var/lib/phalanx/10.0.0.2"),
    "# local (10.0.0.1): hand over the token",
    f"env {PYTHON} -m phalanx.cluster.node token --folder /var/lib/phalanx/10.0.0.1 < '/home/op/my token'",
    "# beta (10.0.0.2): hand over the token",
    remote(f"env {GREETING} {PYTHON} -m phalanx.cluster.node token --folder /var/lib/phalanx/10.0.0.2")
    + " < '/home/op/my token'",
    "# local (10.0.0.1): start Ray, the head",
    f"env {ray_variables('10.0.0.1')} {PYTHON} -m ray.scripts.scripts start --head --port 6379 "
    "--include-dashboard false --disable-usage-stats --node-ip-address 10.0.0.1 --num-gpus 1 "
    "--object-store-memory 268435456 --temp-dir /var/lib/phalanx/10.0.0.1/ray",
    "# beta (10.0.0.2): start Ray and join the head",
    remote(
        f"env {ray_variables('10.0.0.2')} {GREETING} {PYTHON} -m ray.scripts.scripts start --address 10.0.0.1:6379 "
        "--node-ip-address 10.0.0.2 --num-gpus 1 --object-store-memory 268435456 "
        "--temp-dir /var/lib/phalanx/10.0.0.2/ray"
    ),
    "# local (10.0.0.1): wait until all nodes have joined",
    f"env RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/var/lib/phalanx/10.0.0.1/token {PYTHON} -m phalanx.cluster.node "
    "members --address 10.0.0.1:6379 --patience 90 --expect 10.0.0.1 10.0.0.2",
]
EXPECTED_DOWN = [
    "# beta (10.0.0.2): stop this cluster's Ray processes",
    remote(f"env {GREETING} {PYTHON} -m phalanx.cluster.node stop --folder /var/lib/phalanx/10.0.0.2"),
    "# local (10.0.0.1): stop this cluster's Ray processes",
    f"env {PYTHON} -m phalanx.cluster.node stop --folder /var/lib/phalanx/10.0.0.1",
]


@pytest.mark.parametrize(("action", "expected"), [("up", EXPECTED_UP), ("down", EXPECTED_DOWN)])
def test_a_dry_run_prints_every_command_and_runs_none(tmp_path: Path, action: str, expected: list[str]) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(HOSTS.replace("ssh.conf", "/etc/ssh.conf").replace("/home/op/my token", f"{tmp_path}/my token"))
    result = CliRunner().invoke(app, ["cluster", action, "--nodes", str(hosts), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert result.output.replace(str(tmp_path), "/home/op").splitlines() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.toml"]


def test_a_shell_reads_a_remote_command_back_as_it_was_written() -> None:
    """By a shell of its own, as on the other side of ssh."""
    cluster = parse_hosts(HOSTS, Path("/etc/hosts.toml"))
    words = ("printf", "%s\n", "a b", "it's", '"$HOME"', "`id`", "x;y", "*", "")
    line = argv(cluster, Command(cluster.workers[0], "print", words))[-1]
    printed = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == list(words[2:])


def test_no_command_holds_the_token_and_one_a_node_takes_it() -> None:
    cluster = parse_hosts(HOSTS, Path("/etc/hosts.toml"))
    taking = [command for command in commands_of_up(cluster) if command.takes_token]
    assert [command.node for command in taking] == list(cluster.nodes)
    assert all(shown(cluster, command).endswith("< '/home/op/my token'") for command in taking)


def test_ray_options_of_a_cpu_node_and_of_a_service() -> None:
    cluster = parse_hosts(HOSTS.replace("gpus = 1", "ranks = 2"), Path("/etc/hosts.toml"))
    words = ray_start(cluster, cluster.head, block=True)
    assert words[words.index("--num-cpus") + 1] == "2"
    assert words[words.index("--num-gpus") + 1] == "0"
    assert words[-1] == "--block"
    assert serve_options(cluster)[-2:] == ["--ranks-per-node", "2"]


def test_without_rdma_nothing_is_said_of_it() -> None:
    assert set(fabric_environment("eth0", ())) == {
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "TP_SOCKET_IFNAME",
        "UCX_NET_DEVICES",
        "OMPI_MCA_btl_tcp_if_include",
    }
    assert "NCCL_IB_SUBNET_AWARE_ROUTING" not in fabric_environment("eth0", ("mlx5_0",))
