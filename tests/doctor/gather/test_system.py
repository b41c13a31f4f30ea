"""The host, from a recorded DGX Spark and small changes to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.doctor.gather.host import CommandError
from phalanx.doctor.gather.kernel_log import parse_xids
from phalanx.doctor.gather.system import hub_cache, numa_node_of, read_system
from tests.doctor.gather.recorded import SPARK_COMMANDS, SPARK_FILES, recorded_host

KIB, GIB = 1024, 2**30


def test_a_spark(tmp_path: Path) -> None:
    host = recorded_host(tmp_path, SPARK_FILES, SPARK_COMMANDS, {"HF_HOME": str(tmp_path / "not" / "yet")})
    system = read_system(host)
    assert (system.hostname, system.product, system.kernel) == ("spark-1", "NVIDIA DGX Spark", "6.11.0-1016-nvidia")
    assert system.os == "Ubuntu 24.04.3 LTS"
    assert (system.cpu, system.cores) == ("Cortex-X925 + Cortex-A725", 4)
    assert system.instructions == ("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2")
    assert system.numa_nodes == 1
    assert (system.memory_bytes, system.available_bytes) == (125513752 * KIB, 100000000 * KIB)
    assert (system.swap_bytes, system.swap_used_bytes) == (16777212 * KIB, 777212 * KIB)
    assert (system.swappiness, system.hugepages, system.transparent_hugepages) == (60, 3, "madvise")
    assert (system.memlock_bytes, system.nofile) == (-1, 1024)
    assert (system.iommu, system.gui, system.container) == (True, True, False)
    assert system.xids == (31, 79)
    assert system.disk is not None
    assert system.disk.path == str(tmp_path / "not" / "yet" / "hub")
    assert system.disk.free_bytes > 0
    assert host.unread == []


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    host = recorded_host(tmp_path)
    system = read_system(host)
    assert system.hostname
    told = {
        name: getattr(system, name)
        for name in system.__struct_fields__
        if name not in ("hostname", "kernel", "architecture", "disk") and getattr(system, name) is not None
    }
    assert told == {"instructions": ()}, "what cannot be read is None"
    assert host.unread == ["The kernel's log cannot be read, so Xid errors cannot be told: dmesg is not installed."]


def test_a_server_with_two_threads_a_core(tmp_path: Path) -> None:
    blocks = [
        f"processor\t: {i}\nmodel name\t: Intel(R) Xeon(R) Platinum 8480+\n"
        f"physical id\t: {i % 2}\ncore id\t: {i // 4}\nflags\t\t: fpu avx2 avx512f amx_bf16 {'amx_tile' if i else ''}\n"
        for i in range(8)
    ]
    system = read_system(recorded_host(tmp_path, {"/proc/cpuinfo": "\n".join(blocks)}))
    assert (system.cpu, system.cores) == ("Intel(R) Xeon(R) Platinum 8480+", 4)
    assert system.instructions == ("avx2", "avx512f", "amx_bf16"), "one processor lacks amx_tile"


@pytest.mark.parametrize(
    ("limit", "used", "cached", "expected"),
    [
        ("max", 10 * GIB, 0, (64 * GIB, 60 * GIB)),
        (128 * GIB, 10 * GIB, 0, (64 * GIB, 60 * GIB)),
        (16 * GIB, 10 * GIB, 4 * GIB, (16 * GIB, 10 * GIB)),
        (16 * GIB, 17 * GIB, 0, (16 * GIB, 0)),
    ],
)
def test_a_containers_share_of_memory(
    tmp_path: Path, limit: str | int, used: int, cached: int, expected: tuple[int, int]
) -> None:
    files = {
        "/proc/meminfo": f"MemTotal: {64 * GIB // KIB} kB\nMemAvailable: {60 * GIB // KIB} kB\n",
        "/sys/fs/cgroup/memory.max": f"{limit}\n",
        "/sys/fs/cgroup/memory.current": f"{used}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {cached}\n",
    }
    system = read_system(recorded_host(tmp_path, files))
    assert (system.memory_bytes, system.available_bytes) == expected


def test_memory_without_what_is_available_is_not_guessed(tmp_path: Path) -> None:
    system = read_system(
        recorded_host(tmp_path, {"/proc/meminfo": "MemTotal: 10 kB\nMemFree: 5 kB\nSwapTotal: 1 kB\n"})
    )
    assert (system.memory_bytes, system.available_bytes, system.swap_used_bytes) == (10 * KIB, None, None)


@pytest.mark.parametrize(
    ("types", "translates"), [([], False), (["identity"], False), (["identity", "DMA"], True), ([None], True)]
)
def test_an_iommu_that_passes_through_does_not_count(tmp_path: Path, types: list[str | None], translates: bool) -> None:
    (tmp_path / "sys/kernel/iommu_groups").mkdir(parents=True)
    for i, kind in enumerate(types):
        name = f"/sys/kernel/iommu_groups/{i}/{'type' if kind else 'other'}"
        recorded_host(tmp_path, {name: kind or ""})
    assert read_system(recorded_host(tmp_path)).iommu is translates


@pytest.mark.parametrize(
    ("files", "environ"),
    [
        ({"/.dockerenv": ""}, {}),
        ({"/run/.containerenv": ""}, {}),
        ({"/proc/1/cgroup": "0::/kubepods/burstable/pod1\n"}, {}),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
        ({}, {"APPTAINER_CONTAINER": "/x.sif"}),
    ],
)
def test_a_container_cannot_say_that_no_desktop_runs(
    tmp_path: Path, files: dict[str, str], environ: dict[str, str]
) -> None:
    host = recorded_host(tmp_path, {"/proc/1/comm": "python3\n", "/proc/1/cgroup": "0::/\n"} | files, environ=environ)
    system = read_system(host)
    assert (system.container, system.gui) == (True, None)


def test_a_server_without_a_desktop(tmp_path: Path) -> None:
    system = read_system(recorded_host(tmp_path, {"/proc/1/comm": "systemd\n", "/proc/1/cgroup": "0::/init.scope\n"}))
    assert (system.container, system.gui) == (False, False)


def test_xids_from_the_kernels_own_file_where_dmesg_is_missing(tmp_path: Path) -> None:
    line = "4,1,2,-;NVRM: Xid (PCI:0000:4f:00): 48, pid='<unknown>', DBE\n"
    assert read_system(recorded_host(tmp_path, {"/dev/kmsg": line})).xids == (48,)
    forbidden = {"dmesg": CommandError("dmesg ended with 1 and said: Operation not permitted")}
    host = recorded_host(tmp_path / "other", commands=forbidden)
    assert read_system(host).xids is None
    assert "Operation not permitted" in host.unread[0]
    assert read_system(recorded_host(tmp_path / "third", commands={"dmesg": "all quiet\n"})).xids == ()


def test_only_the_drivers_lines_are_xids() -> None:
    assert parse_xids("a process said Xid 79\nNVRM: GPU at PCI:0000:4f:00: GPU-1\n") == ()


def test_where_weights_are_kept_follows_hugging_faces_order(tmp_path: Path) -> None:
    def cache(**environ: str) -> str:
        return str(hub_cache(recorded_host(tmp_path, environ=environ)))

    assert cache(HF_HUB_CACHE="/a", HF_HOME="/b", XDG_CACHE_HOME="/c") == "/a"
    assert cache(HUGGINGFACE_HUB_CACHE="/d", HF_HOME="/b") == "/d"
    assert cache(HF_HOME="/b", XDG_CACHE_HOME="/c") == "/b/hub"
    assert cache(XDG_CACHE_HOME="/c") == "/c/huggingface/hub"
    assert cache() == str(Path.home() / ".cache/huggingface/hub")


def test_where_weights_are_kept_as_hugging_face_says(tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    assert str(hub_cache(recorded_host(tmp_path, environ=os.environ))) == constants.HF_HUB_CACHE


def test_the_numa_node_of_a_gpu(tmp_path: Path) -> None:
    host = recorded_host(
        tmp_path,
        {"/sys/bus/pci/devices/0000:4f:00.0/numa_node": "1\n", "/sys/bus/pci/devices/0000:52:00.0/numa_node": "-1\n"},
    )
    assert numa_node_of(host, "00000000:4F:00.0") == 1
    assert numa_node_of(host, "00000000:52:00.0") is None, "the kernel says -1 where it does not know"
    assert numa_node_of(host, "00000000:99:00.0") is None
    assert numa_node_of(host, None) is None
