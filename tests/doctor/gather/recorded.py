"""A machine in a folder: files as recorded, commands that answer from a table, and an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.doctor.gather.host import CommandError, Host


def recorded_host(
    root: Path,
    files: Mapping[str, str] | None = None,
    commands: Mapping[str, str | CommandError] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Host:
    """A command is answered by the longest recorded beginning of it; any other is not installed."""
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(arguments: Sequence[str], seconds: float) -> str:
        line = " ".join(arguments)
        matches = sorted((begin for begin in commands or {} if line.startswith(begin)), key=len)
        if not matches:
            raise CommandError(f"{arguments[0]} is not installed.")
        answer = (commands or {})[matches[-1]]
        if isinstance(answer, CommandError):
            raise answer
        return answer

    return Host(root, run, dict(environ or {}))


SPARK_FILES = {
    "/proc/sys/kernel/hostname": "spark-1\n",
    "/proc/sys/kernel/osrelease": "6.11.0-1016-nvidia\n",
    "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
    "/etc/dgx-release": 'DGX_NAME="DGX Spark"\nDGX_PRETTY_NAME="NVIDIA DGX Spark"\nDGX_SERIAL_NUMBER="1234567890"\n',
    "/sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n",
    "/proc/cpuinfo": "\n".join(
        f"processor\t: {i}\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd asimdhp asimddp sve sve2 i8mm bf16\n"
        f"CPU implementer\t: 0x41\nCPU part\t: {'0xd85' if i < 2 else '0xd87'}\n"
        for i in range(4)
    ),
    "/proc/meminfo": "MemTotal:       125513752 kB\nMemFree:         1000000 kB\nMemAvailable:   100000000 kB\n"
    "SwapTotal:      16777212 kB\nSwapFree:       16000000 kB\nHugePages_Total:       3\nHugepagesize: 2048 kB\n",
    "/proc/sys/vm/swappiness": "60\n",
    "/proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units\n"
    "Max open files            1024                 1048576              files\n"
    "Max locked memory         unlimited            unlimited            bytes\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "/sys/kernel/iommu_groups/0/type": "identity\n",
    "/sys/kernel/iommu_groups/1/type": "DMA-FQ\n",
    "/sys/devices/system/node/node0/cpulist": "0-3\n",
    "/sys/devices/system/node/possible": "0\n",
    "/proc/1/comm": "systemd\n",
    "/proc/1/cgroup": "0::/init.scope\n",
    "/proc/812/comm": "gnome-shell\n",
    "/sys/bus/pci/devices/000f:01:00.0/numa_node": "0\n",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.142  Release Build\n"
    "GCC version:  gcc version 13.3.0\n",
}
_NETWORK = {
    "enp1s0f0np0": ("rocep1s0f0", "up", "200000", "9000"),
    "enP2p1s0f0np0": ("roceP2p1s0f0", "up", "200000", "1500"),
    "enp1s0f1np1": ("rocep1s0f1", "down", "-1", "1500"),
    "wlan0": (None, "up", "", "1500"),
    "lo": (None, "unknown", "", "65536"),
}
for _name, (_device, _state, _speed, _mtu) in _NETWORK.items():
    SPARK_FILES[f"/sys/class/net/{_name}/operstate"] = f"{_state}\n"
    SPARK_FILES[f"/sys/class/net/{_name}/speed"] = f"{_speed}\n"
    SPARK_FILES[f"/sys/class/net/{_name}/mtu"] = f"{_mtu}\n"
    if _device:
        SPARK_FILES[f"/sys/class/infiniband/{_device}/device/net/{_name}/mtu"] = f"{_mtu}\n"

SPARK_COMMANDS: dict[str, str | CommandError] = {
    "dmesg": "[    1.0] nvidia: loading\n[ 9.1] NVRM: Xid (PCI:000f:01:00): 31, pid=5, name=python3\n"
    "[ 9.2] NVRM: Xid (PCI:000f:01:00): 79, GPU has fallen off the bus.\n"
    "[ 9.3] NVRM: Xid (PCI:000f:01:00): 31, pid=6\n",
    "ip -json addr": """[{"ifname":"lo","addr_info":[{"family":"inet","local":"127.0.0.1","prefixlen":8}]},
      {"ifname":"enp1s0f0np0","mtu":9000,"addr_info":[
        {"family":"inet","local":"192.168.100.1","prefixlen":24,"scope":"global"},
        {"family":"inet6","local":"fe80::1","prefixlen":64,"scope":"link"}]},
      {"ifname":"enP2p1s0f0np0","addr_info":[{"family":"inet","local":"169.254.3.1","prefixlen":16}]},{}]""",
    "ibv_devinfo": "hca_id:\trocep1s0f0\n\ttransport:\t\tInfiniBand (0)\n\t\tport:\t1\n\t\t\tmax_mtu:\t\t4096 (5)\n"
    "\t\t\tactive_mtu:\t\t4096 (5)\n\nhca_id:\troceP2p1s0f0\n\t\tport:\t1\n\t\t\tactive_mtu:\t\t1024 (3)\n",
}
