"""NVLinks, topology, peer access and the fabric: each fault beside the machine that only looks like it."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.doctor.checks import fabric, links
from phalanx.doctor.checks.toll import step_toll, toll
from phalanx.doctor.facts import Fabric, FabricManager, Facts, GpuPath, NvLink
from phalanx.models import catalog
from phalanx.spec.machine import Gpu, Link
from tests.doctor.build_machines import change, h100, hgx, mesh, no_bridge, pcie_fallback, spark
from tests.doctor.checks.test_gpus import BARE, machine, said, with_first


def bridged(name: str, active: int, of: int = 18, count: int = 2) -> Facts:
    """Cards of one kind with so many links active."""
    cards = tuple(
        change(BARE, index=index, name=name, links=tuple(NvLink(link, link < active) for link in range(of)))
        for index in range(count)
    )
    return machine(*cards)


@pytest.mark.parametrize(
    ("name", "active", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 18, [("ok", "nvlinks")]),
        ("NVIDIA H100 80GB HBM3", 17, [("error", "nvlinks")]),
        ("NVIDIA H100 80GB HBM3", 0, [("error", "nvlinks")]),
        ("NVIDIA A100-SXM4-80GB", 12, [("ok", "nvlinks")]),
        ("NVIDIA B200", 18, [("ok", "nvlinks")]),
        ("NVIDIA H100 PCIe", 12, [("ok", "nvlinks")]),
        ("NVIDIA H100 PCIe", 8, [("warning", "nvlinks")]),
        ("NVIDIA H100 PCIe", 0, []),
        ("NVIDIA H100 NVL", 12, [("ok", "nvlinks")]),
        ("NVIDIA H100 NVL", 18, [("ok", "nvlinks")]),
        ("NVIDIA GeForce RTX 3090", 4, [("ok", "nvlinks")]),
        ("NVIDIA GeForce RTX 3090", 0, []),
        ("NVIDIA GH200 480GB", 0, []),
        ("NVIDIA L40S", 0, []),
        ("NVIDIA Z9000", 3, []),
    ],
)
def test_active_links_against_the_product(name: str, active: int, expected: list[tuple[str, str]]) -> None:
    assert said(links.nvlinks(bridged(name, active))) == expected


def test_a_single_card_of_a_board_needs_no_links() -> None:
    assert said(links.nvlinks(bridged("NVIDIA H100 80GB HBM3", 0, count=1))) == []


def test_links_that_were_not_read_are_not_judged() -> None:
    assert said(links.nvlinks(with_first(hgx(), links=None))) == []
    assert said(links.nvlinks(with_first(hgx(), links=(), mig="on"))) == []


def test_errors_and_unlike_speeds_of_links() -> None:
    erring = tuple(NvLink(link, True, 26.562, 3 if link == 4 else 0) for link in range(18))
    finding = links.nvlink_errors(with_first(hgx(), links=erring))
    assert finding is not None
    assert (finding.level, finding.found) == ("warning", "GPU 0 link 4: 3")
    slow = tuple(NvLink(link, True, 13.281 if link == 4 else 26.562, 0) for link in range(18))
    assert said(links.nvlink_errors(with_first(hgx(), links=slow))) == [("warning", "nvlink_errors")]
    assert said(links.nvlink_errors(hgx())) == [("ok", "nvlink_errors")]
    untold = tuple(NvLink(link, True) for link in range(18))
    assert said(links.nvlink_errors(with_first(hgx(), links=untold))) == []


def islands(*groups: tuple[int, ...], name: str = "NVIDIA A100 80GB PCIe") -> Facts:
    """Cards of which those of a group are joined by NV12, the others over SYS."""
    count = sum(map(len, groups))
    cards = tuple(change(BARE, index=index, name=name) for index in range(count))
    paths = tuple(
        GpuPath(path.a, path.b, "nvlink", 12, "ok") if any({path.a, path.b} <= set(g) for g in groups) else path
        for path in mesh(count, "sys")
    )
    return machine(*cards, paths=paths)


def test_nvlink_everywhere_is_fine() -> None:
    finding = links.topology(hgx())
    assert finding is not None
    assert (finding.level, finding.found) == ("ok", "NVLink between all 8 GPUs (NV18)")


def test_pairs_are_advised_to_stay_pairs_in_rank_order() -> None:
    finding = links.topology(islands((0, 3), (1, 2)))
    assert finding is not None
    assert finding.level == "warning"
    assert "islands 0+3, 1+2" in finding.found
    assert "TP at 2 and run 2 replicas" in finding.fix
    assert "CUDA_VISIBLE_DEVICES=0,3,1,2" in finding.fix


def test_a_board_that_lost_a_gpu_is_an_error() -> None:
    finding = links.topology(islands((0, 1, 2, 4, 5, 6, 7), (3,), name="NVIDIA H100 80GB HBM3"))
    assert finding is not None
    assert finding.level == "error"
    assert finding.found.startswith("GPU 3 reached over SYS")


def test_a_chain_of_bridges_is_not_everywhere() -> None:
    chain = change(
        islands((0, 1), (2,)), paths=(GpuPath(0, 1, "nvlink", 4), GpuPath(1, 2, "nvlink", 4), GpuPath(0, 2, "phb"))
    )
    finding = links.topology(chain)
    assert finding is not None
    assert finding.level == "warning"
    assert "in a chain" in finding.found


def test_without_nvlink_the_level_says_whether_it_could_be_had() -> None:
    assert said(links.topology(pcie_fallback())) == [("note", "topology")]
    assert said(links.topology(no_bridge())) == [("warning", "topology")]
    fallen = change(hgx(), paths=mesh(8, "sys"))
    assert said(links.topology(fallen)) == [("error", "topology")]


def test_pairs_that_were_not_read_are_no_topology() -> None:
    assert said(links.topology(change(hgx(), paths=hgx().paths[1:]))) == [("note", "topology")]
    assert said(links.topology(spark())) == []


def test_of_two_contradicting_paths_the_worse_counts() -> None:
    assert said(links.topology(change(hgx(), paths=(*hgx().paths, GpuPath(1, 0, "sys"))))) == [("error", "topology")]


def test_the_toll_is_the_cost_models() -> None:
    spec = catalog.entries()["Llama-3.3-70B"].spec
    over_pcie = 160 * all_reduce_seconds(32 * 8192 * 2, 4, Link("pcie", 25e9), "nccl")
    over_switch = 160 * all_reduce_seconds(32 * 8192 * 2, 4, Gpu.named("H100-SXM").link, "nccl")
    assert step_toll(spec, 4, 32, Link("pcie", 25e9)) == pytest.approx(over_pcie)
    assert f"about {over_pcie * 1e3:.1f} ms over PCIe, {over_switch * 1e3:.1f} ms over NVSwitch" in toll(
        pcie_fallback()
    )
    assert over_pcie > 4 * over_switch


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("ok", [("ok", "p2p")]),
        ("unknown", []),
        (None, []),
        ("chipset", [("warning", "p2p")]),
        ("disabled", [("warning", "p2p")]),
    ],
)
def test_peer_access(status: Any, expected: list[tuple[str, str]]) -> None:
    paths = tuple(change(path, p2p=status) for path in pcie_fallback().paths)
    assert said(links.p2p(change(pcie_fallback(), paths=paths))) == expected


def test_peer_access_that_geforce_never_has_is_a_note_unless_it_was_switched_off() -> None:
    assert said(links.p2p(no_bridge())) == [("note", "p2p")]
    paths = tuple(change(path, p2p="disabled") for path in no_bridge().paths)
    assert said(links.p2p(change(no_bridge(), paths=paths))) == [("warning", "p2p")]


def test_an_iommu_matters_where_peers_talk_over_pcie() -> None:
    def with_iommu(facts: Facts, state: bool | None) -> Facts:
        return change(facts, system=change(facts.system, iommu=state))

    assert said(links.iommu(with_iommu(pcie_fallback(), True))) == [("warning", "iommu")]
    assert said(links.iommu(with_iommu(pcie_fallback(), None))) == []
    assert said(links.iommu(with_iommu(hgx(), True))) == []
    assert said(links.iommu(with_iommu(no_bridge(), True))) == []


@pytest.mark.parametrize(
    ("manager", "expected"),
    [
        (FabricManager(True, "580.95.05", 4), [("ok", "fabric_manager")]),
        (FabricManager(False, None, 4), [("error", "fabric_manager")]),
        (FabricManager(False, None, None), [("error", "fabric_manager")]),
        (FabricManager(False, None, 0), []),
        (FabricManager(True, "580.82.07", 4), [("error", "fabric_manager")]),
        (FabricManager(True, "580.95.05", 4, "failed to train links"), [("warning", "fabric_manager")]),
        (FabricManager(None, None, 4), []),
        (None, []),
    ],
)
def test_the_fabric_manager(manager: FabricManager | None, expected: list[tuple[str, str]]) -> None:
    assert said(fabric.fabric_manager(change(hgx(), fabric_manager=manager))) == expected


def test_no_fabric_manager_is_expected_without_switches_or_on_a_rack_tray() -> None:
    missing = FabricManager(False, None, None)
    tray = tuple(change(h100(index), name="NVIDIA GB200") for index in range(4))
    assert said(fabric.fabric_manager(change(hgx(), gpus=tray, fabric_manager=missing))) == []
    assert said(fabric.fabric_manager(change(pcie_fallback(), fabric_manager=missing))) == []
    four = change(hgx(), gpus=hgx().gpus[:4], paths=mesh(4, "nvlink", 6), fabric_manager=missing)
    assert said(fabric.fabric_manager(four)) == []


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (Fabric("completed", "Success", "healthy"), [("ok", "fabric_state")]),
        (Fabric("completed", None, None), [("ok", "fabric_state")]),
        (Fabric("in-progress"), [("error", "fabric_state")]),
        (Fabric("not-started"), [("error", "fabric_state")]),
        (Fabric("completed", "Unknown Error"), [("error", "fabric_state")]),
        (Fabric("completed", "Success", "unhealthy"), [("error", "fabric_state")]),
        (Fabric("completed", "Success", "limited"), [("warning", "fabric_state")]),
        (Fabric("not-supported"), []),
        (None, []),
    ],
)
def test_the_fabrics_state(state: Fabric | None, expected: list[tuple[str, str]]) -> None:
    assert said(fabric.fabric_state(with_first(hgx(), fabric=state))) == expected
