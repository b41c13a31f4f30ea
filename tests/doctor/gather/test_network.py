"""Interfaces, RDMA devices, variables and large frames."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.doctor.facts import Nic
from phalanx.doctor.gather.host import CommandError
from phalanx.doctor.gather.network import (
    parse_addresses,
    parse_devinfo,
    parse_ibdev2netdev,
    read_network,
    recorded_environment,
)
from phalanx.doctor.gather.smi import ParseError
from tests.doctor.gather.recorded import SPARK_COMMANDS, SPARK_FILES, recorded_host

TOO_LONG = CommandError("ping ended with 1", "ping: local error: message too long, mtu=1500")
SILENT = CommandError("ping ended with 1", "2 packets transmitted, 0 received, 100% packet loss")


def test_the_interfaces_of_a_spark(tmp_path: Path) -> None:
    host = recorded_host(tmp_path, SPARK_FILES, SPARK_COMMANDS)
    assert read_network(host).nics == (
        Nic("enP2p1s0f0np0", True, 200000, 1500, ("169.254.3.1/16",), "roceP2p1s0f0", 1024),
        Nic("enp1s0f0np0", True, 200000, 9000, ("192.168.100.1/24",), "rocep1s0f0", 4096),
        Nic("enp1s0f1np1", False, None, 1500, (), "rocep1s0f1", None),
        Nic("wlan0", True, None, 1500),
    )
    assert host.unread == []


def test_without_tools_the_rest_is_told(tmp_path: Path) -> None:
    host = recorded_host(tmp_path, SPARK_FILES)
    nics = {nic.name: nic for nic in read_network(host).nics}
    assert nics["enp1s0f0np0"] == Nic("enp1s0f0np0", True, 200000, 9000, (), "rocep1s0f0", None)
    assert host.unread == [
        "Addresses of network interfaces cannot be told: ip is not installed.",
        "The MTU of RDMA devices cannot be told: ibv_devinfo is not installed.",
    ]


def test_an_interface_without_a_state_of_its_own_is_up_by_its_carrier(tmp_path: Path) -> None:
    files = {"/sys/class/net/tun0/operstate": "unknown\n", "/sys/class/net/tun0/carrier": "1\n"}
    [nic] = read_network(recorded_host(tmp_path, files)).nics
    assert nic.up
    [nic] = read_network(recorded_host(tmp_path, files | {"/sys/class/net/tun0/carrier": "0\n"})).nics
    assert not nic.up


def test_rdma_devices_by_nvidias_script_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    files = {"/sys/class/infiniband/mlx5_0/node_type": "1\n", "/sys/class/net/ib0/operstate": "up\n"}
    commands = {"ibdev2netdev": "mlx5_0 port 1 ==> ib0 (Up)\n"}
    [nic] = read_network(recorded_host(tmp_path, files, commands)).nics
    assert nic.rdma == "mlx5_0"


def test_ibdev2netdev() -> None:
    text = "rocep1s0f0 port 1 ==> enp1s0f0np0 (Up)\nrocep1s0f1 port 1 ==> enp1s0f1np1 (Down)\n"
    assert parse_ibdev2netdev(text) == {"enp1s0f0np0": "rocep1s0f0", "enp1s0f1np1": "rocep1s0f1"}
    for broken in (text.replace(" ==> ", " "), text.replace("(Up)", ""), text * 2):
        with pytest.raises(ParseError, match="it has the line"):
            parse_ibdev2netdev(broken)


def test_of_several_ports_the_least_mtu_counts() -> None:
    text = "hca_id: mlx5_0\n port: 1\n  active_mtu: 4096 (5)\n port: 2\n  active_mtu: 1024 (3)\n"
    assert parse_devinfo(text) == {"mlx5_0": 1024}
    for broken in (text.removeprefix("hca_id: mlx5_0\n"), text.replace("4096 (5)", "big")):
        with pytest.raises(ParseError):
            parse_devinfo(broken)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[", '[{"ifname": 3}]', '[{"addr_info": [{"prefixlen": "x"}]}]'])
def test_broken_addresses_are_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_addresses(text)


def test_only_variables_that_choose_devices_and_networks_are_recorded() -> None:
    secrets = {
        "RAY_AUTH_TOKEN": "t",
        "RAY_AUTH_TOKEN_PATH": "/t",
        "HF_TOKEN": "t",
        "AWS_SECRET_ACCESS_KEY": "t",
        "NCCL_SECRET_TOKEN": "t",
        "PATH": "/bin",
        "RAY_REDIS_PASSWORD": "t",
        "RAY_JOB_HEADERS": "Authorization: t",
    }
    chosen = {
        "NCCL_IB_HCA": "rocep1s0f0",
        "NCCL_SOCKET_IFNAME": "enp1s0f0np0",
        "GLOO_SOCKET_IFNAME": "enp1s0f0np0",
        "TP_SOCKET_IFNAME": "enp1s0f0np0",
        "UCX_NET_DEVICES": "enp1s0f0np0",
        "MASTER_ADDR": "192.168.100.1",
        "RAY_AUTH_MODE": "token",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    assert recorded_environment(secrets | chosen) == chosen


def test_frames_of_9000_bytes(tmp_path: Path) -> None:
    commands = {
        "ping -c 2 -W 2 -M do -s 8972 fast": "2 received",
        "ping -c 2 -W 2 -M do -s 8952 fd00::2": "2 received",
        "ping -c 2 -W 2 -M do -s 8972 slow": TOO_LONG,
        "ping -c 2 -W 2 slow": "2 received",
        "ping -c 2 -W 2 -M do -s 8972 off": SILENT,
        "ping -c 2 -W 2 off": SILENT,
    }
    host = recorded_host(tmp_path, commands=commands)
    assert read_network(host, ["fast", "fd00::2", "slow", "off"]).jumbo_to == {
        "fast": True,
        "fd00::2": True,
        "slow": False,
    }
    assert host.unread == ["off does not answer: ping ended with 1"]


def test_a_ping_that_cannot_forbid_cutting_says_nothing(tmp_path: Path) -> None:
    old = CommandError("ping ended with 1", "ping: invalid option -- 'M'\n")
    host = recorded_host(tmp_path, commands={"ping -c 2 -W 2 -M": old, "ping -c 2 -W 2 peer": "2 received"})
    assert read_network(host, ["peer"]).jumbo_to == {}
    assert "cannot be tried" in host.unread[0]


@pytest.mark.parametrize("peer", ["-f", "", "a b", "x;y", "--help"])
def test_a_peer_is_never_an_option(tmp_path: Path, peer: str) -> None:
    host = recorded_host(tmp_path, commands={"ping": "2 received"})
    assert read_network(host, [peer]).jumbo_to == {}
    assert "is no name or address" in host.unread[0]
