"""The GPUs as nvidia-smi's commands tell them: the way for machines where NVML cannot be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from phalanx.doctor.facts import GpuFacts, GpuPath
from phalanx.doctor.gather.found import FoundGpus, has_unified_memory
from phalanx.doctor.gather.host import CommandError, Host
from phalanx.doctor.gather.smi import query
from phalanx.doctor.gather.smi.nvlink import parse_link_errors, parse_links, parse_listing
from phalanx.doctor.gather.smi.report import SmiReport, parse_report
from phalanx.doctor.gather.smi.text import ParseError
from phalanx.doctor.gather.smi.topology import Topology, parse_peers, parse_topology

FIELDS = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "driver_version",
    "compute_cap",
    "memory.total",
    "memory.used",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
    "power.draw",
    "power.limit",
    "power.default_limit",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "persistence_mode",
)
_NEWER_NAMES = {"clocks_throttle_reasons.active": "clocks_event_reasons.active"}
_SECONDS = 60.0
T = TypeVar("T")


def read_smi(host: Host) -> FoundGpus:
    """Raises where not even the table of GPUs can be read; all else that fails goes to `host.unread`."""
    rows = _query_gpus(host)
    report = _ask(host, parse_report, "-q") or SmiReport(None, None)
    gpus = _with_lists(host, [gpu_of(row) for row in rows], report)
    topology = _topology(host, len(gpus))
    if topology is not None:
        gpus = [msgspec.structs.replace(gpu, numa_node=topology.numa_nodes.get(gpu.index)) for gpu in gpus]
    paths = _paths(host, topology) if topology is not None and topology.paths else ()
    driver = next((row.get("driver_version") for row in rows if row.get("driver_version")), report.driver)
    return FoundGpus(tuple(gpus), (), paths, driver, report.cuda)


def _query_gpus(host: Host) -> list[query.QueryRow]:
    """The table of GPUs, less the fields that this driver does not know by any name."""
    fields = list(FIELDS)
    while True:
        try:
            text = _run(host, f"--query-gpu={','.join(fields)}", "--format=csv")
        except CommandError as error:
            unknown = query.invalid_field(error.output)
            if unknown not in fields[2:]:
                raise
            place = fields.index(unknown)
            fields[place : place + 1] = [_NEWER_NAMES[unknown]] if unknown in _NEWER_NAMES else []
            continue
        return query.parse_query(text, fields)


def gpu_of(row: query.QueryRow) -> GpuFacts:
    """A GPU from its row. Only its index and name must be there."""
    index, name = query.whole(row.get("index")), row.get("name")
    if index is None or name is None:
        raise ParseError("nvidia-smi --query-gpu", "a GPU has no index or no name")
    unified = has_unified_memory(name)
    return GpuFacts(
        index=index,
        name=name,
        uuid=row.get("uuid"),
        bus_id=row.get("pci.bus_id"),
        capability=row.get("compute_cap"),
        unified=unified,
        memory_total_mib=None if unified else query.whole(row.get("memory.total")),
        memory_used_mib=None if unified else query.whole(row.get("memory.used")),
        mig=query.mig_mode(row.get("mig.mode.current")),
        ecc=query.switched(row.get("ecc.mode.current")),
        uncorrected_errors=query.whole(row.get("ecc.errors.uncorrected.volatile.total")),
        temperature_c=query.whole(row.get("temperature.gpu")),
        throttle=query.throttles(row.get("clocks_throttle_reasons.active") or row.get("clocks_event_reasons.active")),
        power_w=query.decimal(row.get("power.draw")),
        power_limit_w=query.decimal(row.get("power.limit")),
        power_default_w=query.decimal(row.get("power.default_limit")),
        pcie_width=query.whole(row.get("pcie.link.width.current")),
        pcie_width_max=query.whole(row.get("pcie.link.width.max")),
        persistence=query.switched(row.get("persistence_mode")),
    )


def _with_lists(host: Host, gpus: list[GpuFacts], report: SmiReport) -> list[GpuFacts]:
    """Adds what other commands tell of each GPU: links, slices, processes, fabric and memory rows."""
    if len({gpu.index for gpu in gpus}) < len(gpus):
        raise ParseError("nvidia-smi --query-gpu", "two GPUs have the same index")
    links = _ask(host, parse_links, "nvlink", "--status")
    errors = _ask(host, parse_link_errors, "nvlink", "-e") if links else None
    sliced = {gpu.uuid for gpu in _ask(host, parse_listing, "-L") or () if gpu.slices}
    apps = f"--query-compute-apps={','.join(query.PROCESS_FIELDS)}"
    processes = _ask(host, query.parse_processes, apps, "--format=csv") or {}
    reported = {gpu.bus_id.lower(): gpu for gpu in report.gpus}
    whole = []
    for gpu in gpus:
        counted = (errors or {}).get(gpu.index, {})
        of_gpu = () if links == {} else (links or {}).get(gpu.index)
        told = reported.get((gpu.bus_id or "").lower())
        whole.append(
            msgspec.structs.replace(
                gpu,
                links=of_gpu and tuple(msgspec.structs.replace(link, errors=counted.get(link.link)) for link in of_gpu),
                mig="on" if gpu.uuid in sliced else gpu.mig,
                processes=processes.get(gpu.uuid or "", ()),
                fabric=told.fabric if told else None,
                remapped=told.remapped if told else None,
                retired=told.retired if told else None,
            )
        )
    return whole


def _topology(host: Host, gpus: int) -> Topology | None:
    topology = _ask(host, parse_topology, "topo", "-m")
    if topology is not None and topology.gpus != gpus:
        host.unread.append(f"nvidia-smi topo -m shows {topology.gpus} GPUs and the query {gpus}: paths are not taken.")
        return None
    return topology


def _paths(host: Host, topology: Topology) -> tuple[GpuPath, ...]:
    peers = _ask(host, parse_peers, "topo", "-p2p", "r") or {}
    return tuple(msgspec.structs.replace(path, p2p=peers.get((path.a, path.b))) for path in topology.paths)


def _ask(host: Host, parse: Callable[[str], T], *arguments: str) -> T | None:
    """What the parser makes of the command's output, or nothing and a sentence about it."""
    try:
        return parse(_run(host, *arguments))
    except ParseError as error:
        host.unread.append(error.found)
    except CommandError as error:
        host.unread.append(f"nvidia-smi {' '.join(arguments)} tells nothing: {error.found}")
    return None


def _run(host: Host, *arguments: str) -> str:
    return host.command("nvidia-smi", *arguments, seconds=_SECONDS)
