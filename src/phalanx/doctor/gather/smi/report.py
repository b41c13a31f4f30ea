"""`nvidia-smi -q`: an indented list. Read for what no query field tells on every driver: fabric, rows and pages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from phalanx.doctor.facts import Fabric, FabricState, Health, RemappedRows, RetiredPages
from phalanx.doctor.gather.smi.text import ParseError, lines_of, whole_number

_REPORT = "nvidia-smi -q"
_GPU = re.compile(r"GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9])")
_STATES: dict[str, FabricState] = {
    "Not Started": "not-started",
    "In Progress": "in-progress",
    "Completed": "completed",
    "N/A": "not-supported",
    "Not Supported": "not-supported",
}
_HEALTHS: dict[str, Health] = {"Healthy": "healthy", "Unhealthy": "unhealthy", "Limited Capacity": "limited"}
_YES = {"Yes": True, "No": False}


@dataclass(frozen=True)
class ReportedGpu:
    """What a report says of the GPU at this bus address."""

    bus_id: str
    fabric: Fabric | None
    remapped: RemappedRows | None
    retired: RetiredPages | None


@dataclass(frozen=True)
class SmiReport:
    driver: str | None
    cuda: str | None
    gpus: list[ReportedGpu] = field(default_factory=list)


def parse_report(text: str) -> SmiReport:
    """Reads `nvidia-smi -q`, whole or with `-d` for a part of it."""
    lines = [line.rstrip() for line in lines_of(_REPORT, text) if line.strip()]
    if not lines or "NVSMI LOG" not in lines[0]:
        raise ParseError(_REPORT, "it does not begin with NVSMI LOG")
    starts = [i for i, line in enumerate(lines) if _GPU.fullmatch(line)]
    head = _block(lines[1 : starts[0] if starts else len(lines)])
    attached = whole_number(head.get(("Attached GPUs",), ""))
    if attached != len(starts):
        raise ParseError(_REPORT, f"it speaks of {attached} attached GPUs and lists {len(starts)}")
    gpus = [_gpu(lines[start:end]) for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]
    if len({gpu.bus_id for gpu in gpus}) < len(gpus):
        raise ParseError(_REPORT, "two GPUs have the same bus address")
    return SmiReport(head.get(("Driver Version",)), head.get(("CUDA Version",)), gpus)


def _gpu(lines: list[str]) -> ReportedGpu:
    values = _block(lines[1:])
    bus_id = lines[0].removeprefix("GPU ")
    return ReportedGpu(bus_id, _fabric(values), _remapped(values), _retired(values))


def _block(lines: list[str]) -> dict[tuple[str, ...], str]:
    """Values by the titles above them: those before it that are indented less."""
    values: dict[tuple[str, ...], str] = {}
    above: list[tuple[int, str]] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        name, found, value = line.strip().partition(" : ")
        above = [(depth, title) for depth, title in above if depth < indent]
        path = (*(title for _, title in above), name.rstrip())
        if not found:
            above.append((indent, name))
        elif values.setdefault(path, value.strip()) != value.strip() and path[0] in _READ:
            raise ParseError(_REPORT, f"it says both {values[path][:40]!r} and {value.strip()[:40]!r} of {path[-1]}")
    return values


_READ = {"Fabric", "Remapped Rows", "Retired Pages", "Attached GPUs"}


def _fabric(values: dict[tuple[str, ...], str]) -> Fabric | None:
    state = _STATES.get(values.get(("Fabric", "State"), ""))
    if state is None:
        return None
    status = values.get(("Fabric", "Status"))
    health = _HEALTHS.get(values.get(("Fabric", "Health", "Summary"), ""))
    return Fabric(state, None if status in (None, "N/A") else status, health)


def _remapped(values: dict[tuple[str, ...], str]) -> RemappedRows | None:
    correctable, uncorrectable = (
        whole_number(values.get(("Remapped Rows", f"{kind} Error"), "")) for kind in ("Correctable", "Uncorrectable")
    )
    pending = _YES.get(values.get(("Remapped Rows", "Pending"), ""))
    failed = _YES.get(values.get(("Remapped Rows", "Remapping Failure Occurred"), ""))
    if correctable is None or uncorrectable is None or pending is None or failed is None:
        return None
    return RemappedRows(correctable, uncorrectable, pending, failed)


def _retired(values: dict[tuple[str, ...], str]) -> RetiredPages | None:
    single, double = (
        whole_number(values.get(("Retired Pages", f"{kind} Bit ECC"), "")) for kind in ("Single", "Double")
    )
    pending = _YES.get(values.get(("Retired Pages", "Pending Page Blacklist"), ""))
    if single is None or double is None or pending is None:
        return None
    return RetiredPages(single, double, pending)
