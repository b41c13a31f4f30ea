"""The network of one machine, and of several."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.doctor.checks import across, network
from phalanx.doctor.facts import Facts, NetworkFacts, Nic
from tests.doctor.build_machines import change, hgx, spark
from tests.doctor.checks.test_gpus import machine, said

FAST = "enp1s0f1np1"
TWIN = "enP2p1s0f1np1"


def with_nic(facts: Facts, name: str, **told: Any) -> Facts:
    nics = tuple(change(nic, **told) if nic.name == name else nic for nic in facts.network.nics)
    return change(facts, network=change(facts.network, nics=nics))


def with_environment(facts: Facts, **told: str) -> Facts:
    return change(facts, network=change(facts.network, environment=told))


@pytest.mark.parametrize(
    ("check", "facts", "expected"),
    [
        (network.link_speed, with_nic(spark(), FAST, speed_mbps=100_000), [("warning", "link_speed")]),
        (network.link_speed, with_nic(spark(), FAST, speed_mbps=None), [("ok", "link_speed")]),
        (network.mtu, with_nic(spark(), FAST, mtu=1500), [("warning", "mtu")]),
        (network.mtu, with_nic(spark(), "enP7s7", mtu=1500), [("ok", "mtu")]),
        (network.roce_functions, spark(), [("ok", "roce_functions")]),
        (network.roce_functions, with_nic(spark(), TWIN, addresses=()), [("warning", "roce_functions")]),
        (network.roce_functions, with_nic(spark(), TWIN, up=False), [("warning", "roce_functions")]),
        (
            network.roce_functions,
            with_nic(spark(), TWIN, addresses=("192.168.100.9/24",)),
            [("warning", "roce_subnets")],
        ),
        (
            network.roce_functions,
            with_nic(spark(), TWIN, addresses=("not an address",)),
            [("warning", "roce_functions")],
        ),
    ],
)
def test_a_fast_port_and_its_finding(check: Any, facts: Facts, expected: list[tuple[str, str]]) -> None:
    assert said(check(facts)) == expected
    assert said(check(machine())) == []


def test_a_spark_without_cables_is_left_alone() -> None:
    alone = change(spark(), network=NetworkFacts((Nic("enP7s7", True, 10_000, 1500, ("10.0.0.1/24",)),)))
    for check in (network.roce_functions, network.socket_interface, network.rdma_devices, network.mtu):
        assert said(check(alone)) == []


def test_large_frames_that_are_lost_break_what_was_set_to_send_them() -> None:
    lost = change(spark(), network=change(spark().network, jumbo_to={"10.0.0.2": False}))
    assert said(network.jumbo(lost)) == [("error", "jumbo")]
    small = change(hgx(), network=NetworkFacts((Nic("eth0", True, 25_000, 1500),), {}, {"10.0.0.2": False}))
    assert said(network.jumbo(small)) == [("warning", "jumbo")]
    assert said(network.jumbo(change(spark(), network=change(spark().network, jumbo_to={})))) == []


@pytest.mark.parametrize(
    ("rule", "name", "matches"),
    [
        ("eth", "eth0", True),
        ("=eth", "eth0", False),
        ("=eth0", "eth0", True),
        ("^docker,lo", "eth0", True),
        ("^docker,lo", "docker0", False),
        ("ib0,eth1", "eth0", False),
    ],
)
def test_nccls_rule_for_interfaces(rule: str, name: str, matches: bool) -> None:
    assert network.names_interface(rule, name) == matches


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NCCL_SOCKET_IFNAME": FAST, "GLOO_SOCKET_IFNAME": FAST}, []),
        ({"NCCL_SOCKET_IFNAME": FAST}, [("note", "socket_interface")]),
        ({"NCCL_SOCKET_IFNAME": "enP7s7", "GLOO_SOCKET_IFNAME": FAST}, [("warning", "socket_interface")]),
        ({"NCCL_SOCKET_IFNAME": "eth9", "GLOO_SOCKET_IFNAME": FAST}, [("error", "socket_interface")]),
    ],
)
def test_where_ranks_meet(variables: dict[str, str], expected: list[tuple[str, str]]) -> None:
    assert said(network.socket_interface(with_environment(spark(), **variables))) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"NCCL_IB_HCA": "rocep1s0f1,roceP2p1s0f1"}, []),
        ({"NCCL_IB_HCA": "rocep1s0f1:1,roceP2p1s0f1:1"}, []),
        ({"NCCL_IB_HCA": "roce"}, []),
        ({"NCCL_IB_HCA": "rocep1s0f1"}, [("warning", "rdma_devices")]),
        ({"NCCL_IB_HCA": "mlx5_0"}, [("error", "rdma_devices")]),
        ({"NCCL_IB_DISABLE": "1"}, [("warning", "rdma_devices")]),
        ({"NCCL_IB_DISABLE": "0"}, []),
    ],
)
def test_which_rdma_devices_are_used(variables: dict[str, str], expected: list[tuple[str, str]]) -> None:
    assert said(network.rdma_devices(with_environment(spark(), **variables))) == expected


def test_peer_access_that_was_switched_off_and_forgotten() -> None:
    off = with_environment(hgx(), NCCL_P2P_DISABLE="1")
    assert said(network.p2p_switched_off(off)) == [("warning", "p2p_switched_off")]
    assert said(network.p2p_switched_off(with_environment(spark(), NCCL_P2P_DISABLE="1"))) == []
    assert said(network.p2p_switched_off(hgx())) == []


def together(second: Facts) -> list[tuple[str, str]]:
    """What is said of a healthy Spark beside another one, but for what is fine."""
    checks = (across.hostnames, across.addresses, across.subnets, across.same_mtu, across.versions, across.same_gpus)
    machines = [spark(1), second]
    return [pair for check in checks for pair in said(check(machines)) if pair[0] != "ok"]


def test_two_good_machines_go_together() -> None:
    assert together(spark(2)) == []


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (change(spark(2), software=change(spark(2).software, nccl="2.29.2")), [("error", "versions")]),
        (change(spark(2), software=change(spark(2).software, nccl=None)), []),
        (change(spark(2), software=change(spark(2).software, driver="580.142")), [("warning", "versions")]),
        (change(spark(2), software=change(spark(2).software, python="3.11.9")), [("error", "versions")]),
        (change(spark(2), software=change(spark(2).software, python="3.12.9")), []),
        (change(spark(2), system=change(spark(2).system, hostname="spark-1")), [("error", "hostnames")]),
        (with_nic(spark(2), FAST, addresses=("192.168.100.1/24",)), [("error", "addresses")]),
        (with_nic(spark(2), TWIN, addresses=("192.168.77.2/24",)), [("warning", "subnets")]),
        (with_nic(spark(2), FAST, mtu=1500), [("error", "same_mtu")]),
        (change(spark(2), gpus=hgx().gpus[:1]), [("warning", "same_gpus")]),
    ],
)
def test_what_must_be_the_same_and_what_must_not(second: Facts, expected: list[tuple[str, str]]) -> None:
    assert together(second) == expected


def test_ports_that_never_meet_are_an_error() -> None:
    elsewhere = with_nic(with_nic(spark(2), FAST, addresses=("10.1.0.2/24",)), TWIN, addresses=("10.2.0.2/24",))
    assert together(elsewhere) == [("error", "subnets")]
