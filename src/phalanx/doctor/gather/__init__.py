"""gather: the facts of this machine, from NVML or nvidia-smi, the kernel, the network and the installed packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from phalanx.doctor.facts import Facts
from phalanx.doctor.gather.fabric_manager import count_switches, read_fabric_manager
from phalanx.doctor.gather.found import FoundGpus
from phalanx.doctor.gather.host import CommandError, Host
from phalanx.doctor.gather.network import read_network
from phalanx.doctor.gather.nvml import NvmlError, read_nvml
from phalanx.doctor.gather.record import FactsError, read_facts, write_facts
from phalanx.doctor.gather.smi import ParseError, read_smi
from phalanx.doctor.gather.software import read_software
from phalanx.doctor.gather.system import numa_node_of, read_system

__all__ = ["FactsError", "Host", "gather", "read_facts", "write_facts"]


def gather(
    peers: Iterable[str] = (),
    host: Host | None = None,
    ask_nvml: Callable[[list[str]], FoundGpus] = read_nvml,
    venv: Path | None = None,
) -> Facts:
    """What this machine is. What cannot be read is said in `unread`; nothing here raises, but for a wrong `venv`.

    `peers` are machines to try with frames of 9000 bytes, `venv` the environment whose engines are meant.
    """
    host = host or Host()
    found = _find_gpus(host, ask_nvml)
    gpus = tuple(
        msgspec.structs.replace(
            gpu, numa_node=numa_node_of(host, gpu.bus_id) if gpu.numa_node is None else gpu.numa_node
        )
        for gpu in found.gpus
    )
    return Facts(
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        system=read_system(host),
        software=read_software(host, found.driver, found.driver_cuda, len(gpus), venv),
        gpus=gpus,
        lost_gpus=found.lost,
        paths=found.paths,
        fabric_manager=read_fabric_manager(host) if gpus or count_switches(host) else None,
        network=read_network(host, peers),
        unread=tuple(host.unread),
    )


def _find_gpus(host: Host, ask_nvml: Callable[[list[str]], FoundGpus]) -> FoundGpus:
    """By NVML, else by nvidia-smi."""
    try:
        return ask_nvml(host.unread)
    except NvmlError as error:
        host.unread.append(error.found)
    try:
        return read_smi(host)
    except (CommandError, ParseError) as error:
        host.unread.append(f"nvidia-smi cannot tell of GPUs either: {error.found}")
        return FoundGpus()
