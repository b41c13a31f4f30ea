"""Ten recorded machines, and exactly what the doctor has to say about each."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.doctor.checks import judge, judge_together
from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding
from tests.doctor.build_machines import FOLDER, MACHINES, encoded

HGX_FINE = {
    "gpu_names",
    "mig",
    "ecc",
    "ecc_errors",
    "remapped_rows",
    "xid",
    "nvlinks",
    "nvlink_errors",
    "topology",
    "p2p",
    "fabric_manager",
    "fabric_state",
    "throttle",
    "power_limit",
    "pcie_width",
    "persistence",
    "gpu_memory",
    "driver_for_torch",
    "torch_gpus",
    "shm",
    "nofile",
    "swap",
    "hugepages",
    "numa",
    "disk",
}
SPARK_FINE = {
    "gpu_names",
    "xid",
    "throttle",
    "persistence",
    "unified_memory",
    "driver_for_torch",
    "torch_gpus",
    "memlock",
    "nofile",
    "swap",
    "swappiness",
    "gui",
    "hugepages",
    "disk",
    "link_speed",
    "mtu",
    "jumbo",
    "roce_functions",
}
EXPECTED: dict[str, set[tuple[str, str]]] = {
    "hgx_healthy": {("note", "power_supply")},
    "pcie_fallback": {("warning", "shm"), ("note", "topology"), ("note", "power_supply")},
    "one_link_down": {("error", "nvlinks"), ("error", "xid"), ("note", "power_supply")},
    "mig_on": {("error", "mig"), ("note", "unread"), ("note", "power_supply")},
    "fabric_manager_missing": {
        ("error", "fabric_manager"),
        ("error", "fabric_state"),
        ("error", "torch_gpus"),
        ("note", "power_supply"),
    },
    "throttled": {("warning", "throttle"), ("warning", "power_limit"), ("note", "power_supply")},
    "mixed_cards": {
        ("warning", "gpu_names"),
        ("warning", "pcie_width"),
        ("warning", "gpu_memory"),
        ("note", "topology"),
        ("note", "p2p"),
        ("note", "persistence"),
        ("note", "nofile"),
        ("note", "power_supply"),
    },
    "rtx3090_no_bridge": {("warning", "topology"), ("note", "p2p"), ("note", "power_supply")},
    "spark_healthy": set(),
    "spark_wrong_subnet": {("warning", "roce_subnets")},
}


def recorded(name: str) -> Facts:
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Facts)


def unwell(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.level, finding.code) for finding in findings if finding.level != "ok"}


def fine(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings if finding.level == "ok"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_machine_gets_exactly_these_findings(name: str) -> None:
    assert unwell(judge(recorded(name))) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_files_are_what_the_builder_writes(name: str) -> None:
    assert (FOLDER / f"{name}.json").read_bytes() == encoded(MACHINES[name]())
    assert set(MACHINES) == set(EXPECTED)


def test_a_healthy_machine_is_told_what_is_fine() -> None:
    assert fine(judge(recorded("hgx_healthy"))) == HGX_FINE
    assert fine(judge(recorded("spark_healthy"))) == SPARK_FINE


def test_findings_come_worst_first() -> None:
    levels = [finding.level for finding in judge(recorded("fabric_manager_missing"))]
    assert levels == sorted(levels, key=["error", "warning", "note", "ok"].index)


def test_the_throttled_machine_tells_heat_from_the_supply() -> None:
    titles = {finding.title: finding for finding in judge(recorded("throttled"))}
    assert titles["Clocks are held down by heat"].found == "GPU 3: 88 C"
    assert "11.2 kW" in titles["The power supply brakes the cards"].found
    assert titles["The power limit is lowered"].found == "GPU 7: 500 of 700 W"


def test_what_is_wrong_has_a_reason_or_a_way_out() -> None:
    for name in EXPECTED:
        for finding in judge(recorded(name)):
            assert finding.title
            assert finding.found
            if finding.level in ("error", "warning"):
                assert finding.why
                assert finding.fix


def test_two_sparks_of_which_one_is_wrong() -> None:
    together = judge_together([recorded("spark_healthy"), recorded("spark_wrong_subnet")])
    assert unwell(together) == {("warning", "subnets")}
    assert {"versions", "addresses"} <= fine(together)
