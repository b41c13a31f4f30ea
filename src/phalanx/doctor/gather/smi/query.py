"""`nvidia-smi --query-gpu` and `--query-compute-apps`: tables of comma-separated values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from phalanx.doctor.facts import GpuProcess, Throttle
from phalanx.doctor.gather.smi.text import ParseError, lines_of, whole_number

_QUERY = "nvidia-smi --query"
_UNIT = re.compile(r"(\S+) \[(\S+)\]")
_MISSING = re.compile(r"\[.*\]|N/A|Not Supported|", re.IGNORECASE)
_DECIMAL = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")
_MASK = re.compile(r"0x[0-9a-fA-F]{16}")
_INVALID_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field to query')
_RENAMED = {"clocks_throttle_reasons": "clocks_event_reasons", "used_memory": "used_gpu_memory"}
THROTTLES: dict[int, Throttle] = {
    0x04: "power-cap",
    0x08: "hw-slowdown",
    0x20: "sw-thermal",
    0x40: "hw-thermal",
    0x80: "power-brake",
}
QueryRow = dict[str, str | None]
"""By field asked for: the cell, without its unit. `None` where the driver has no value, or the cell makes no sense."""


def parse_query(text: str, fields: Sequence[str]) -> list[QueryRow]:
    """Reads a table with a header, asked for as `fields` in this order; only the last field may hold commas.

    Columns go by position, because drivers rename some. A column whose title is no name of the field is not taken.
    """
    header, *lines = [line for line in lines_of(_QUERY, text) if line.strip()] or [""]
    titles = [title.strip() for title in header.split(",")]
    if len(titles) != len(fields):
        raise ParseError(_QUERY, f"its header names {len(titles)} columns, and {len(fields)} were asked for")
    units = [_unit_of(title, field) for title, field in zip(titles, fields, strict=True)]
    if all(unit is None for unit in units):
        raise ParseError(_QUERY, f"its header {header.strip()[:60]!r} names no field that was asked for")
    rows = []
    for line in lines:
        cells = [cell.strip() for cell in line.split(",", len(fields) - 1)]
        if len(cells) != len(fields):
            raise ParseError(_QUERY, f"the row {line.strip()[:60]!r} has {len(cells)} cells for {len(fields)} columns")
        rows.append({field: _value(cell, unit) for field, cell, unit in zip(fields, cells, units, strict=True)})
    return rows


def _unit_of(title: str, field: str) -> str | None:
    """The unit in the title, if any, or `None` where the title is not this field's."""
    with_unit = _UNIT.fullmatch(title)
    name, unit = with_unit.groups() if with_unit else (title, "")
    renamed = next((field.replace(old, new) for old, new in _RENAMED.items() if field.startswith(old)), field)
    return unit if name in (field, renamed) else None


def _value(cell: str, unit: str | None) -> str | None:
    if unit is None or _MISSING.fullmatch(cell):
        return None
    if not unit:
        return cell
    value, _, found = cell.partition(" ")
    return value if found == unit else None


def invalid_field(said: str) -> str | None:
    """The field that this driver does not know, from what nvidia-smi says then."""
    match = _INVALID_FIELD.search(said)
    return match[1] if match else None


def whole(cell: str | None) -> int | None:
    return None if cell is None else whole_number(cell)


def decimal(cell: str | None) -> float | None:
    return float(cell) if cell is not None and _DECIMAL.fullmatch(cell) else None


def switched(cell: str | None) -> bool | None:
    """`Enabled` or `Disabled`."""
    return {"Enabled": True, "Disabled": False}.get(cell or "")


def mig_mode(cell: str | None) -> Literal["on", "off"] | None:
    on = switched(cell)
    return None if on is None else "on" if on else "off"


def throttles(mask: str | None) -> tuple[Throttle, ...] | None:
    """Why clocks are held down, from the bits of `clocks_throttle_reasons.active`."""
    return throttles_of(int(mask, 16)) if mask is not None and _MASK.fullmatch(mask) else None


def throttles_of(bits: int) -> tuple[Throttle, ...]:
    return tuple(name for bit, name in THROTTLES.items() if bits & bit)


PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")


def parse_processes(text: str) -> dict[str, tuple[GpuProcess, ...]]:
    """Reads `--query-compute-apps` of PROCESS_FIELDS: the processes by UUID of their GPU."""
    processes: dict[str, tuple[GpuProcess, ...]] = {}
    for row in parse_query(text, PROCESS_FIELDS):
        uuid, pid = row["gpu_uuid"], whole(row["pid"])
        if uuid is None or pid is None:
            raise ParseError(_QUERY, "a process has no GPU or no number")
        found = GpuProcess(pid, program_name(row["process_name"]), whole(row["used_memory"]))
        processes[uuid] = (*processes.get(uuid, ()), found)
    return processes


def program_name(command: str | None) -> str:
    """The program without its arguments, which may hold secrets."""
    return (command or "").strip().partition(" ")[0] or "unknown"
