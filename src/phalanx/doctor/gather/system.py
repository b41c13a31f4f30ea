"""The host: processor, memory, limits and the state of its kernel, from /proc, /sys and /etc."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from phalanx.doctor.facts import Disk, System
from phalanx.doctor.gather.host import Host
from phalanx.doctor.gather.kernel_log import read_xids

_INSTRUCTIONS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimdhp",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
    "sme",
)
"""Those that decide how fast a CPU multiplies, by the names that the kernel gives them."""
_ARM_CORES = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
    "0xd85": "Cortex-X925",
    "0xd87": "Cortex-A725",
}
_DESKTOPS = {
    "Xorg",
    "Xwayland",
    "gnome-shell",
    "gdm3",
    "gdm",
    "kwin_wayland",
    "kwin_x11",
    "plasmashell",
    "lightdm",
    "sddm",
    "weston",
    "sway",
}
_CONTAINER_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")
_KIB = 1024


def read_system(host: Host) -> System:
    processor = _processor(host)
    memory = _meminfo(host)
    container = _in_container(host)
    total, available = _memory(host, memory)
    swap, unused = memory.get("SwapTotal"), memory.get("SwapFree")
    return System(
        hostname=host.text("/proc/sys/kernel/hostname") or os.uname().nodename,
        product=_product(host),
        os=_assignments(host, "/etc/os-release").get("PRETTY_NAME"),
        kernel=host.text("/proc/sys/kernel/osrelease") or os.uname().release,
        architecture=os.uname().machine,
        cpu=processor.name,
        cores=processor.cores,
        instructions=processor.instructions,
        numa_nodes=_numa_nodes(host),
        memory_bytes=total,
        available_bytes=available,
        swap_bytes=swap,
        swap_used_bytes=None if swap is None or unused is None else swap - unused,
        swappiness=host.number("/proc/sys/vm/swappiness"),
        shm_bytes=_room(host.path("/dev/shm"), free=False),
        memlock_bytes=_limit(host, "Max locked memory"),
        nofile=_limit(host, "Max open files"),
        hugepages=memory.get("HugePages_Total"),
        transparent_hugepages=_chosen(host.text("/sys/kernel/mm/transparent_hugepage/enabled")),
        iommu=_iommu(host),
        gui=_desktop(host, container),
        container=container,
        xids=read_xids(host),
        disk=_disk(host),
    )


def numa_node_of(host: Host, bus_id: str | None) -> int | None:
    """The NUMA node of a PCIe device, by its address as NVIDIA writes it: 00000000:4F:00.0."""
    if bus_id is None:
        return None
    domain, _, rest = bus_id.lower().partition(":")
    node = host.number(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")
    return None if node is None or node < 0 else node


def _meminfo(host: Host) -> dict[str, int]:
    """/proc/meminfo in bytes, and its counts of pages as they are."""
    text = host.text("/proc/meminfo") or ""
    found = re.findall(r"^(\w+):\s+(\d{1,15})( kB)?$", text, re.MULTILINE)
    return {name: int(number) * (_KIB if unit else 1) for name, number, unit in found}


def _memory(host: Host, meminfo: dict[str, int]) -> tuple[int | None, int | None]:
    """Memory in all and available: the machine's, or a container's share where that is less."""
    total, available = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
    limit, used = host.number("/sys/fs/cgroup/memory.max"), host.number("/sys/fs/cgroup/memory.current")
    if total is None or limit is None or limit >= total:
        return total, available
    if available is None or used is None:
        return limit, None
    cached = re.search(r"^inactive_file (\d{1,18})$", host.text("/sys/fs/cgroup/memory.stat") or "", re.MULTILINE)
    return limit, min(available, max(limit - used + (int(cached[1]) if cached else 0), 0))


@dataclass(frozen=True)
class _Processor:
    name: str | None = None
    cores: int | None = None
    instructions: tuple[str, ...] = ()


def _processor(host: Host) -> _Processor:
    """From /proc/cpuinfo. Instructions are those that every core has."""
    blocks = re.split(r"\n\s*\n", host.text("/proc/cpuinfo") or "")
    found = [dict(re.findall(r"^([^\t:\n]+?)[ \t]*:[ \t]*(.*)$", block, re.MULTILINE)) for block in blocks]
    processors: list[dict[str, str]] = [processor for processor in found if "processor" in processor]
    if not processors:
        return _Processor()
    parts = dict.fromkeys(_ARM_CORES.get(part, part) for p in processors if (part := p.get("CPU part")))
    cores = {(p["physical id"], p["core id"]) for p in processors if "physical id" in p and "core id" in p}
    flags = set.intersection(*(set((p.get("flags") or p.get("Features") or "").split()) for p in processors))
    return _Processor(
        name=processors[0].get("model name") or " + ".join(parts) or None,
        cores=len(cores) or len(processors),
        instructions=tuple(name for name in _INSTRUCTIONS if name in flags),
    )


def _numa_nodes(host: Host) -> int | None:
    entries = host.entries("/sys/devices/system/node")
    return None if entries is None else sum(bool(re.fullmatch(r"node\d+", entry)) for entry in entries) or None


def _product(host: Host) -> str | None:
    """As the maker calls it: from DGX OS, the firmware, or an Arm board's device tree."""
    release = _assignments(host, "/etc/dgx-release").get("DGX_PRETTY_NAME")
    return release or host.text("/sys/class/dmi/id/product_name") or host.text("/proc/device-tree/model") or None


def _assignments(host: Host, name: str) -> dict[str, str]:
    return {key: value.strip("\"'") for key, value in re.findall(r"^(\w+)=(.*)$", host.text(name) or "", re.MULTILINE)}


def _limit(host: Host, title: str) -> int | None:
    """The soft limit of this process; -1 is no limit."""
    match = re.search(rf"^{title}\s+(\d{{1,18}}|unlimited)\s", host.text("/proc/self/limits") or "", re.MULTILINE)
    if match is None:
        return None
    return -1 if match[1] == "unlimited" else int(match[1])


def _chosen(text: str | None) -> str | None:
    """Of `always [madvise] never`, the one in brackets."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else None


def _iommu(host: Host) -> bool | None:
    """Whether it translates addresses: groups of type `identity` pass through."""
    groups = host.entries("/sys/kernel/iommu_groups")
    if groups is None:
        return None
    return any(host.text(f"/sys/kernel/iommu_groups/{group}/type") != "identity" for group in groups)


def _in_container(host: Host) -> bool | None:
    if any(host.environ.get(name) for name in _CONTAINER_VARIABLES) or any(map(host.exists, _CONTAINER_MARKS)):
        return True
    groups = host.text("/proc/1/cgroup")
    return None if groups is None else bool(re.search(r"docker|kubepods|containerd|libpod|lxc", groups))


def _desktop(host: Host, container: bool | None) -> bool | None:
    """Whether a desktop runs. A container sees only its own processes, so there "none" means nothing."""
    processes = host.entries("/proc")
    if processes is None:
        return None
    if any(host.text(f"/proc/{process}/comm") in _DESKTOPS for process in processes if process.isdigit()):
        return True
    return None if container else False


def _disk(host: Host) -> Disk | None:
    """Room where Hugging Face keeps what it downloads."""
    cache = hub_cache(host)
    existing = next((folder for folder in (cache, *cache.parents) if os.path.exists(folder)), None)
    free = _room(existing, free=True) if existing else None
    return None if free is None else Disk(str(cache), free)


def hub_cache(host: Host) -> Path:
    """Where weights are kept, by the variables that huggingface_hub reads, in its order."""
    given = host.environ.get
    home = given("HF_HOME") or f"{given('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(os.path.expanduser(given("HF_HUB_CACHE") or given("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"))


def _room(folder: Path, free: bool) -> int | None:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_frsize * (disk.f_bavail if free else disk.f_blocks)
