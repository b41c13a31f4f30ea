"""The machine around the GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.doctor.checks import host
from phalanx.doctor.facts import Disk, Facts, System
from tests.doctor.build_machines import GIB, change, hgx, spark
from tests.doctor.checks.test_gpus import laptop, machine, said


def system(facts: Facts, **told: Any) -> Facts:
    return change(facts, system=change(facts.system, **told))


@pytest.mark.parametrize(
    ("check", "facts", "expected"),
    [
        (host.shm, system(hgx(), shm_bytes=64 * 2**20), [("warning", "shm")]),
        (host.shm, hgx(), [("ok", "shm")]),
        (host.shm, system(hgx(), shm_bytes=None), []),
        (host.shm, system(spark(), shm_bytes=64 * 2**20), []),
        (host.memlock, system(spark(), memlock_bytes=8 * 2**20), [("warning", "memlock")]),
        (host.memlock, spark(), [("ok", "memlock")]),
        (host.memlock, system(hgx(), memlock_bytes=8 * 2**20), []),
        (host.nofile, system(hgx(), nofile=1024), [("note", "nofile")]),
        (host.nofile, system(hgx(), nofile=None), []),
        (host.swap, system(hgx(), swap_used_bytes=3 * GIB), [("warning", "swap")]),
        (host.swap, system(hgx(), swap_used_bytes=2**20), [("ok", "swap")]),
        (host.swap, system(hgx(), swap_used_bytes=None), []),
        (host.swappiness, system(spark(), swappiness=60), [("warning", "swappiness")]),
        (host.swappiness, system(spark(), swappiness=60, swap_bytes=0), []),
        (host.swappiness, system(hgx(), swappiness=60, swap_bytes=GIB), []),
        (host.gui, system(spark(), gui=True), [("warning", "gui")]),
        (host.gui, system(spark(), gui=None), []),
        (host.gui, system(hgx(), gui=True), []),
        (host.hugepages, system(hgx(), hugepages=400_000), [("warning", "hugepages")]),
        (host.hugepages, system(hgx(), hugepages=None), []),
        (host.hugepages, laptop(memory_bytes=GIB, hugepages=0, transparent_hugepages="never"), [("note", "hugepages")]),
        (host.hugepages, system(hgx(), transparent_hugepages="never"), [("ok", "hugepages")]),
        (host.disk, system(hgx(), disk=Disk("/data", 2 * GIB)), [("warning", "disk")]),
        (host.disk, system(hgx(), disk=None), []),
    ],
)
def test_a_limit_and_its_finding(check: Any, facts: Facts, expected: list[tuple[str, str]]) -> None:
    assert said(check(facts)) == expected


def test_gpus_at_one_socket_are_told_where_to_run() -> None:
    at_one = change(hgx(), gpus=tuple(change(gpu, numa_node=1) for gpu in hgx().gpus))
    finding = host.numa(at_one)
    assert finding is not None
    assert finding.level == "note"
    assert "--cpunodebind=1" in finding.fix
    assert said(host.numa(hgx())) == [("ok", "numa")]
    some = change(hgx(), gpus=(change(hgx().gpus[0], numa_node=None), *hgx().gpus[1:]))
    assert said(host.numa(some)) == [("note", "numa")]
    none = change(hgx(), gpus=tuple(change(gpu, numa_node=None) for gpu in hgx().gpus))
    assert said(host.numa(none)) == []
    assert said(host.numa(system(hgx(), numa_nodes=1))) == []


def test_what_could_not_be_read_is_said_but_not_that_nothing_is_there() -> None:
    assert said(host.unread(change(hgx(), unread=("dmesg is not permitted.",)))) == [("note", "unread")]
    assert said(host.unread(laptop())) == []
    lost = change(hgx(), unread=("NVML cannot be asked: NVML Shared Library Not Found.",))
    assert said(host.unread(lost)) == [("note", "unread")]


@pytest.mark.parametrize(
    "check", [host.shm, host.memlock, host.nofile, host.swap, host.swappiness, host.gui, host.hugepages, host.numa]
)
def test_a_host_that_tells_nothing_is_not_judged(check: Any) -> None:
    assert said(check(change(machine(*hgx().gpus), system=System("box")))) == []
