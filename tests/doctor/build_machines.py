"""Ten machines as `phalanx doctor --record` would write them, put together from values that real ones report.

    python -m tests.doctor.build_machines

writes them to `tests/doctor/machines`. Each fault is one change to a machine in good health.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from phalanx.doctor.facts import (
    Disk,
    Fabric,
    FabricManager,
    Facts,
    GpuFacts,
    GpuPath,
    GpuProcess,
    NetworkFacts,
    Nic,
    NvLink,
    PathKind,
    RemappedRows,
    Software,
    System,
)

FOLDER = Path(__file__).with_name("machines")
GIB = 2**30
change = msgspec.structs.replace


def h100(index: int, **told: Any) -> GpuFacts:
    """One of eight on an HGX board, idle."""
    healthy = GpuFacts(
        index=index,
        name="NVIDIA H100 80GB HBM3",
        uuid=f"GPU-00000000-0000-0000-0000-{index:012d}",
        bus_id=f"00000000:{0x18 + 16 * index:02X}:00.0",
        capability="9.0",
        memory_total_mib=81559,
        memory_used_mib=4,
        mig="off",
        ecc=True,
        uncorrected_errors=0,
        remapped=RemappedRows(0, 0, pending=False, failed=False),
        temperature_c=31 + index % 3,
        throttle=(),
        power_w=71.5,
        power_limit_w=700.0,
        power_default_w=700.0,
        pcie_width=16,
        pcie_width_max=16,
        persistence=True,
        numa_node=index // 4,
        links=tuple(NvLink(link, True, 26.562, 0) for link in range(18)),
        fabric=Fabric("completed", "Success", "healthy"),
    )
    return change(healthy, **told)


def mesh(count: int, kind: PathKind, links: int = 0, p2p: Any = "ok") -> tuple[GpuPath, ...]:
    return tuple(GpuPath(a, b, kind, links, p2p) for a, b in combinations(range(count), 2))


def server(name: str, **told: Any) -> System:
    """A two-socket server with plenty of everything."""
    plain = System(
        hostname=name,
        product="HGX H100 8-GPU",
        os="Ubuntu 24.04.3 LTS",
        kernel="6.8.0-60-generic",
        architecture="x86_64",
        cpu="Intel(R) Xeon(R) Platinum 8480C",
        cores=112,
        instructions=("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"),
        numa_nodes=2,
        memory_bytes=2048 * GIB,
        available_bytes=1990 * GIB,
        swap_bytes=0,
        swap_used_bytes=0,
        swappiness=60,
        shm_bytes=1024 * GIB,
        memlock_bytes=-1,
        nofile=1048576,
        hugepages=0,
        transparent_hugepages="madvise",
        iommu=False,
        gui=False,
        container=False,
        xids=(),
        disk=Disk("/home/ops/.cache/huggingface/hub", 3500 * GIB),
    )
    return change(plain, **told)


def software(**told: Any) -> Software:
    usual = Software(
        python="3.12.3",
        phalanx="0.1.0",
        driver="580.95.05",
        driver_cuda="13.0",
        torch="2.13.0+cu130",
        torch_cuda="13.0",
        torch_sees_gpus=8,
        nccl="2.29.2",
        triton="3.7.0",
        ray="2.60.0",
    )
    return change(usual, **told)


def facts(
    system: System, software: Software, gpus: tuple[GpuFacts, ...], paths: tuple[GpuPath, ...], **told: Any
) -> Facts:
    return Facts("2026-11-15T09:00:00+00:00", system, software, gpus, paths, **told)


def hgx() -> Facts:
    return facts(
        server("hgx-1"),
        software(),
        tuple(h100(index) for index in range(8)),
        mesh(8, "nvlink", 18),
        fabric_manager=FabricManager(True, "580.95.05", 4),
    )


def pcie_fallback() -> Facts:
    """Four L40S: two at each socket, no NVLink, in a container with Docker's /dev/shm."""
    gpus = tuple(
        change(
            h100(index, links=(), fabric=Fabric("not-supported"), power_limit_w=350.0, power_default_w=350.0),
            name="NVIDIA L40S",
            capability="8.9",
            memory_total_mib=46068,
            mig=None,
            numa_node=index // 2,
        )
        for index in range(4)
    )
    paths = tuple(change(path, kind="node" if path.a // 2 == path.b // 2 else "sys") for path in mesh(4, "sys"))
    return facts(
        server("l40s-1", product="PowerEdge R760xa", shm_bytes=64 * 2**20, container=True, gui=None),
        software(torch_sees_gpus=4),
        gpus,
        paths,
        fabric_manager=FabricManager(None, None, 0),
    )


def link_down() -> Facts:
    healthy = hgx()
    broken = change(
        healthy.gpus[5], links=(*healthy.gpus[5].links[:11], NvLink(11, False), *healthy.gpus[5].links[12:])
    )
    paths = tuple(change(path, links=17) if 5 in (path.a, path.b) else path for path in healthy.paths)
    gpus = (*healthy.gpus[:5], broken, *healthy.gpus[6:])
    return change(healthy, gpus=gpus, paths=paths, system=server("hgx-2", xids=(74,)))


def mig_on() -> Facts:
    healthy = hgx()
    gpus = tuple(
        change(gpu, mig="on", fabric=Fabric("not-supported"), links=()) if gpu.index < 2 else gpu
        for gpu in healthy.gpus
    )
    paths = tuple(path for path in healthy.paths if path.a > 1)
    return change(
        healthy,
        gpus=gpus,
        paths=paths,
        system=server("hgx-3"),
        unread=("GPU 0 and 1: NVLink is not told with MIG on.",),
    )


def no_fabric_manager() -> Facts:
    """After an upgrade of the driver alone: nvidia-smi looks healthy, CUDA does not start."""
    healthy = hgx()
    gpus = tuple(change(gpu, fabric=Fabric("in-progress", None, None)) for gpu in healthy.gpus)
    return change(
        healthy,
        gpus=gpus,
        paths=tuple(change(path, p2p="unknown") for path in healthy.paths),
        system=server("hgx-4"),
        software=software(torch_sees_gpus=0),
        fabric_manager=FabricManager(False, "570.195.03", 4),
    )


def throttled() -> Facts:
    healthy = hgx()
    hot = change(healthy.gpus[3], temperature_c=88, throttle=("sw-thermal", "hw-thermal", "hw-slowdown"))
    braked = change(healthy.gpus[6], throttle=("power-brake", "hw-slowdown"))
    capped = change(healthy.gpus[7], power_limit_w=500.0, throttle=("power-cap",))
    gpus = (*healthy.gpus[:3], hot, *healthy.gpus[4:6], braked, capped)
    return change(healthy, gpus=gpus, system=server("hgx-5"))


def _geforce(index: int, name: str, capability: str, memory: int, watts: float, **told: Any) -> GpuFacts:
    plain = h100(
        index,
        name=name,
        capability=capability,
        memory_total_mib=memory,
        mig=None,
        ecc=None,
        uncorrected_errors=None,
        remapped=None,
        links=(),
        fabric=None,
        persistence=False,
        numa_node=None,
        power_limit_w=watts,
        power_default_w=watts,
    )
    return change(plain, **told)


def _workstation(name: str, **told: Any) -> System:
    return server(
        name,
        **{
            "product": "WRX90 WS EVO",
            "cpu": "AMD Ryzen Threadripper PRO 7965WX 24-Cores",
            "cores": 24,
            "numa_nodes": 1,
            "instructions": ("avx2", "avx512f", "avx512_bf16"),
            "memory_bytes": 256 * GIB,
            "available_bytes": 240 * GIB,
            "shm_bytes": 128 * GIB,
            "memlock_bytes": 8 * GIB,
            "nofile": 1024,
            "gui": True,
            "disk": Disk("/home/me/.cache/huggingface/hub", 700 * GIB),
        }
        | told,
    )


def mixed_cards() -> Facts:
    """Two 4090 and a 3090 below a host bridge; a desktop draws on the first."""
    desktop = (GpuProcess(2211, "Xorg", 310), GpuProcess(2399, "gnome-shell", 1890))
    gpus = (
        _geforce(0, "NVIDIA GeForce RTX 4090", "8.9", 24564, 450.0, memory_used_mib=2300, processes=desktop),
        _geforce(1, "NVIDIA GeForce RTX 4090", "8.9", 24564, 450.0),
        _geforce(2, "NVIDIA GeForce RTX 3090", "8.6", 24576, 350.0, pcie_width=4),
    )
    return facts(_workstation("tower"), software(torch_sees_gpus=3), gpus, mesh(3, "phb", p2p="chipset"))


def no_bridge() -> Facts:
    gpus = tuple(
        _geforce(index, "NVIDIA GeForce RTX 3090", "8.6", 24576, 350.0, persistence=True) for index in range(4)
    )
    return facts(
        _workstation("miner", nofile=65536, gui=False),
        software(torch_sees_gpus=4),
        gpus,
        mesh(4, "phb", p2p="unsupported"),
    )


def _spark_nics(slow: str, first: str, second: str) -> tuple[Nic, ...]:
    return (
        Nic("enP7s7", True, 10000, 1500, (slow,)),
        Nic("docker0", False, None, 1500, ("172.17.0.1/16",)),
        Nic("enp1s0f0np0", False, None, 1500, (), "rocep1s0f0", 1024),
        Nic("enp1s0f1np1", True, 200000, 9000, (first,), "rocep1s0f1", 4096),
        Nic("enP2p1s0f0np0", False, None, 1500, (), "roceP2p1s0f0", 1024),
        Nic("enP2p1s0f1np1", True, 200000, 9000, (second,), "roceP2p1s0f1", 4096),
    )


def spark(number: int = 1, second: str | None = None) -> Facts:
    gpu = GpuFacts(
        index=0,
        name="NVIDIA GB10",
        uuid="GPU-00000000-0000-0000-0000-00000000a110",
        bus_id="0000000F:01:00.0",
        capability="12.1",
        unified=True,
        mig=None,
        temperature_c=35,
        throttle=(),
        power_w=11.2,
        pcie_width=1,
        pcie_width_max=1,
        persistence=True,
        links=(),
    )
    system = System(
        hostname=f"spark-{number}",
        product="NVIDIA DGX Spark",
        os="Ubuntu 24.04.3 LTS",
        kernel="6.14.0-1015-nvidia",
        architecture="aarch64",
        cpu="Cortex-X925 + Cortex-A725",
        cores=20,
        instructions=("asimd", "bf16", "i8mm", "sve", "sve2"),
        numa_nodes=1,
        memory_bytes=124610 * 2**20,
        available_bytes=118000 * 2**20,
        swap_bytes=16 * GIB,
        swap_used_bytes=0,
        swappiness=1,
        shm_bytes=60 * GIB,
        memlock_bytes=-1,
        nofile=65536,
        hugepages=0,
        transparent_hugepages="madvise",
        iommu=True,
        gui=False,
        container=False,
        xids=(),
        disk=Disk("/home/me/.cache/huggingface/hub", 3000 * GIB),
    )
    environment = {
        "NCCL_SOCKET_IFNAME": "enp1s0f1np1",
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "NCCL_IB_HCA": "rocep1s0f1,roceP2p1s0f1",
    }
    slow, fast = f"10.20.0.1{number}/24", f"192.168.100.{number}/24"
    nics = _spark_nics(slow, fast, second or f"192.168.101.{number}/24")
    return facts(
        system,
        software(torch_sees_gpus=1, nccl="2.28.9"),
        (gpu,),
        (),
        network=NetworkFacts(nics, environment, {f"192.168.100.{3 - number}": True}),
    )


def spark_wrong_subnet() -> Facts:
    return spark(2, "192.168.100.102/24")


MACHINES = {
    "hgx_healthy": hgx,
    "pcie_fallback": pcie_fallback,
    "one_link_down": link_down,
    "mig_on": mig_on,
    "fabric_manager_missing": no_fabric_manager,
    "throttled": throttled,
    "mixed_cards": mixed_cards,
    "rtx3090_no_bridge": no_bridge,
    "spark_healthy": spark,
    "spark_wrong_subnet": spark_wrong_subnet,
}


def encoded(machine: Facts) -> bytes:
    return msgspec.json.format(msgspec.json.encode(machine), indent=2) + b"\n"


if __name__ == "__main__":
    for name, build in MACHINES.items():
        (FOLDER / f"{name}.json").write_bytes(encoded(build()))
