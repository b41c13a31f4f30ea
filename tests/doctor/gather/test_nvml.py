"""NVML: an HGX box, a pair of GeForce cards and a DGX Spark, and each way in which a call fails."""

from __future__ import annotations

from threading import Event

import pytest

from phalanx.doctor.facts import Fabric, GpuProcess, NvLink, RemappedRows
from phalanx.doctor.gather.nvml import NvmlError, read_nvml
from tests.doctor.gather.fake_nvml import (
    HGX_LINK,
    LIBRARY_NOT_FOUND,
    LOST,
    NO_PERMISSION,
    Fails,
    FakeLink,
    FakeNvml,
    hgx,
    hgx_gpu,
    pair_of_3090,
    spark,
)


def test_a_healthy_hgx_board() -> None:
    unread: list[str] = []
    nvml = hgx()
    found = read_nvml(unread, nvml)
    assert (found.driver, found.driver_cuda, unread, found.lost) == ("580.95.05", "13.0", [], ())
    assert len(found.gpus) == 8
    gpu = found.gpus[3]
    assert (gpu.index, gpu.name, gpu.uuid, gpu.bus_id) == (3, "NVIDIA H100 80GB HBM3", "GPU-3", "00000000:1B:00.0")
    assert (gpu.capability, gpu.unified, gpu.memory_total_mib, gpu.memory_used_mib) == ("9.0", False, 81559, 4)
    assert (gpu.mig, gpu.ecc, gpu.uncorrected_errors, gpu.remapped) == (
        "off",
        True,
        0,
        RemappedRows(0, 0, False, False),
    )
    assert (gpu.temperature_c, gpu.throttle) == (31, ())
    assert (gpu.power_w, gpu.power_limit_w, gpu.power_default_w) == (71.205, 700.0, 700.0)
    assert (gpu.pcie_width, gpu.pcie_width_max, gpu.persistence) == (16, 16, True)
    assert gpu.fabric == Fabric("completed", "Success", "healthy")
    assert gpu.links == tuple(NvLink(i, active=True, gbs=26.562, errors=0) for i in range(18))
    assert len(found.paths) == 28
    assert {(path.kind, path.links, path.p2p) for path in found.paths} == {("nvlink", 18, "ok")}
    assert nvml.shut_down


def test_a_link_that_is_down_or_barred_is_not_active_and_one_asleep_is() -> None:
    links = [HGX_LINK] * 15 + [FakeLink(0), FakeLink(3), FakeLink(2)]
    found = read_nvml([], FakeNvml([hgx_gpu(0, links), hgx_gpu(1), hgx_gpu(2)]))
    assert [link.active for link in found.gpus[0].links or ()] == [True] * 15 + [False, False, True]
    assert [path.links for path in found.paths] == [16, 16, 18], "as many as both ends have"


def test_a_link_in_the_middle_that_a_card_lacks_does_not_end_the_list() -> None:
    nvml = FakeNvml([hgx_gpu(0)])
    plain = nvml.nvmlDeviceGetNvLinkState

    def state(gpu: int, link: int) -> int:
        if link == 4:
            raise nvml.NVMLError(3)
        return plain(gpu, link)

    nvml.nvmlDeviceGetNvLinkState = state  # type: ignore[method-assign]
    [gpu] = read_nvml([], nvml).gpus
    assert [link.link for link in gpu.links or ()] == [0, 1, 2, 3, *range(5, 18)]


def test_fabric_that_is_not_ready_and_unhealthy() -> None:
    gpus = [hgx_gpu(0), hgx_gpu(1)]
    gpus[0].fabric, gpus[1].fabric = (2, 0, 0), (3, 1, 2)
    found = read_nvml([], FakeNvml(list(gpus)))
    assert found.gpus[0].fabric == Fabric("in-progress", "Success", None)
    assert found.gpus[1].fabric == Fabric("completed", "Uninitialized", "unhealthy")


def test_a_driver_that_knows_only_the_older_question_about_fabric() -> None:
    found = read_nvml([], FakeNvml([hgx_gpu(0)], system={"oldest_fabric_only": True}))
    assert found.gpus[0].fabric == Fabric("completed", "Success")


def test_a_bridged_pair_of_geforce_cards() -> None:
    unread: list[str] = []
    found = read_nvml(unread, pair_of_3090(bridged=True))
    gpu = found.gpus[0]
    assert (gpu.name, gpu.uuid, gpu.bus_id) == ("NVIDIA GeForce RTX 3090", "GPU-0", "00000000:01:00.0")
    assert (gpu.mig, gpu.ecc, gpu.uncorrected_errors, gpu.remapped, gpu.fabric) == (None,) * 5
    assert (gpu.memory_total_mib, gpu.memory_used_mib) == (24576, 512), "by the older call"
    assert gpu.throttle == ("power-cap", "hw-thermal"), "by the older call"
    assert (gpu.power_limit_w, gpu.power_default_w) == (280.0, 350.0)
    assert (gpu.pcie_width, gpu.pcie_width_max, gpu.persistence) == (8, 16, False)
    assert gpu.links == tuple(NvLink(i, active=True, gbs=14.062, errors=3) for i in range(4))
    assert gpu.processes == (GpuProcess(77, "/usr/bin/python3", 300), GpuProcess(78, "unknown", None))
    [path] = found.paths
    assert (path.kind, path.links, path.p2p) == ("nvlink", 4, "ok")
    assert unread == [], "what a card does not have is no failure"


def test_the_same_pair_without_its_bridge() -> None:
    found = read_nvml([], pair_of_3090(bridged=False))
    assert found.gpus[0].links == tuple(NvLink(i, active=False) for i in range(4))
    [path] = found.paths
    assert (path.kind, path.links, path.p2p) == ("phb", 0, "chipset")


def test_unified_memory_is_never_taken_from_the_driver() -> None:
    [gpu] = read_nvml([], spark()).gpus
    assert gpu.unified
    assert (gpu.memory_total_mib, gpu.memory_used_mib) == (None, None)
    assert (gpu.bus_id, gpu.capability) == ("0000000F:01:00.0", "12.1")
    assert (gpu.power_w, gpu.power_limit_w, gpu.links, gpu.mig) == (11.17, None, (), None)
    assert gpu.processes == (GpuProcess(5, "unknown", 40000),)


def test_each_call_fails_for_itself_and_one_sentence_names_all() -> None:
    unread: list[str] = []
    changes = {"PowerUsage": Fails(NO_PERMISSION), "MigMode": Fails(NO_PERMISSION), "Temperature": Fails(999)}
    [gpu] = read_nvml(unread, FakeNvml([hgx_gpu(0, **changes)])).gpus
    assert (gpu.power_w, gpu.mig, gpu.temperature_c) == (None, None, None)
    assert (gpu.power_limit_w, gpu.ecc) == (700.0, True)
    assert unread == [
        "GPU 0: NVML does not tell MIG mode, power: Insufficient Permissions.",
        "GPU 0: NVML does not tell its temperature: Unknown Error.",
    ]


def test_links_that_cannot_be_read_are_none_and_not_inactive() -> None:
    unread: list[str] = []
    nvml = FakeNvml([hgx_gpu(0)])

    def fail(gpu: int, link: int) -> int:
        raise nvml.NVMLError(999)

    nvml.nvmlDeviceGetNvLinkState = fail  # type: ignore[method-assign]
    assert read_nvml(unread, nvml).gpus[0].links is None
    assert unread == ["GPU 0: NVML does not tell its NVLinks: Unknown Error."]


@pytest.mark.parametrize("lost", [Fails(LOST), hgx_gpu(1, Name=Fails(LOST)), hgx_gpu(1, PowerUsage=Fails(LOST))])
def test_a_lost_gpu_is_named_and_takes_no_other_with_it(lost: Fails) -> None:
    unread: list[str] = []
    found = read_nvml(unread, FakeNvml([hgx_gpu(0), lost, hgx_gpu(2)]))
    assert [gpu.index for gpu in found.gpus] == [0, 2]
    assert found.lost == (1,)
    assert [(path.a, path.b) for path in found.paths] == [(0, 2)]
    assert len(unread) == 1
    assert "GPU 1" in unread[0]
    assert "GPU is lost" in unread[0]


def test_paths_that_are_not_told_are_left_out() -> None:
    unread: list[str] = []
    nvml = FakeNvml([hgx_gpu(0, []), hgx_gpu(1, [])], ancestors=lambda a, b: Fails(999), peers=lambda a, b: Fails(999))
    assert read_nvml(unread, nvml).paths == ()
    assert unread == [
        "The driver: NVML does not tell the path of GPU 0 and GPU 1, peer access of GPU 0 and GPU 1: Unknown Error."
    ]


@pytest.mark.parametrize(
    ("code", "kind"), [(0, "pix"), (10, "pix"), (20, "pxb"), (30, "phb"), (40, "node"), (50, "sys")]
)
def test_pcie_paths(code: int, kind: str) -> None:
    [path] = read_nvml([], FakeNvml([hgx_gpu(0, []), hgx_gpu(1, [])], ancestors=lambda a, b: code)).paths
    assert (path.kind, path.links) == (kind, 0)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, "ok"),
        (1, "chipset"),
        (2, "gpu"),
        (3, "topology"),
        (4, "disabled"),
        (5, "unsupported"),
        (6, "unknown"),
        (9, None),
    ],
)
def test_peer_access(code: int, status: str | None) -> None:
    [path] = read_nvml([], FakeNvml([hgx_gpu(0), hgx_gpu(1)], peers=lambda a, b: code)).paths
    assert path.p2p == status


def test_no_driver() -> None:
    with pytest.raises(NvmlError, match="NVML Shared Library Not Found"):
        read_nvml([], FakeNvml([], system={"Init": Fails(LIBRARY_NOT_FOUND)}))


def test_a_driver_that_hangs_is_given_up_on() -> None:
    nvml, release = hgx(), Event()
    nvml.nvmlInit = release.wait  # type: ignore[method-assign,assignment]
    with pytest.raises(NvmlError, match=r"did not answer within 0\.2 s"):
        read_nvml([], nvml, seconds=0.2)
    release.set()


def test_a_binding_that_raises_anything_is_no_crash() -> None:
    nvml = FakeNvml([hgx_gpu(0, CudaComputeCapability=7)])
    with pytest.raises(NvmlError, match="TypeError"):
        read_nvml([], nvml)
