"""`nvidia-smi topo -m` and `topo -p2p r`: how each GPU reaches each other, and whether it may."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from phalanx.doctor.facts import GpuPath, P2pStatus, PathKind
from phalanx.doctor.gather.smi.text import ParseError, lines_of, whole_number

_TOPOLOGY = "nvidia-smi topo -m"
_PEERS = "nvidia-smi topo -p2p"
_DEVICE = re.compile(r"GPU[0-9]{1,3}|NIC[0-9]{1,3}|[a-z][a-z0-9_]*[0-9]")
_GPU = re.compile(r"GPU[0-9]{1,3}")
_NVLINK = re.compile(r"NV([1-9][0-9]?)")
_KINDS: dict[str, PathKind] = {"PIX": "pix", "PXB": "pxb", "PHB": "phb", "NODE": "node", "SYS": "sys"}
_STATUSES: dict[str, P2pStatus] = {
    "OK": "ok",
    "CNS": "chipset",
    "GNS": "gpu",
    "TNS": "topology",
    "NS": "unsupported",
    "DR": "disabled",
    "U": "unknown",
}


@dataclass(frozen=True)
class Topology:
    """Paths between GPUs, and the NUMA node of each GPU where it is told."""

    gpus: int
    paths: tuple[GpuPath, ...]
    numa_nodes: dict[int, int]


def parse_topology(text: str) -> Topology:
    """Reads the matrix of `topo -m`. Rows of NICs may be cut off; every row of a GPU must be there, and be whole."""
    matrix = _read_matrix(_TOPOLOGY, text, lambda cell: cell in _KINDS or bool(_NVLINK.fullmatch(cell)))
    paths = []
    for a, b in combinations(range(len(matrix.cells)), 2):
        there, back = matrix.cells[a][b], matrix.cells[b][a]
        if there != back:
            raise ParseError(_TOPOLOGY, f"GPU{a} reaches GPU{b} by {there}, but GPU{b} reaches GPU{a} by {back}")
        links = _NVLINK.fullmatch(there)
        paths.append(GpuPath(a, b, "nvlink", int(links[1])) if links else GpuPath(a, b, _KINDS[there]))
    return Topology(len(matrix.cells), tuple(paths), _numa_nodes(matrix))


def parse_peers(text: str) -> dict[tuple[int, int], P2pStatus]:
    """Reads `topo -p2p r`: by pair of GPUs whether one may read the other. Of two directions the worse counts."""
    cells = _read_matrix(_PEERS, text, lambda cell: cell in _STATUSES).cells
    statuses = {}
    for a, b in combinations(range(len(cells)), 2):
        there, back = _STATUSES[cells[a][b]], _STATUSES[cells[b][a]]
        statuses[a, b] = back if there == "ok" else there
    return statuses


@dataclass(frozen=True)
class _Matrix:
    """The header, the columns before its tail, and of each GPU its row as printed and that row's cells."""

    header: str
    devices: list[str]
    rows: list[str]
    cells: list[list[str]]


def _read_matrix(command: str, text: str, is_cell: Callable[[str], bool]) -> _Matrix:
    lines = lines_of(command, text)
    top = next((i for i, line in enumerate(lines) if "GPU0" in line), None)
    if top is None or lines[top].startswith("GPU0"):
        raise ParseError(command, "no line names the columns GPU0 and so on")
    devices = _devices(command, lines[top])
    rows: dict[str, str] = {}
    cells: dict[str, list[str]] = {}
    for line in lines[top + 1 :]:
        label, *found = line.split() or [""]
        if label in rows:
            raise ParseError(command, f"there are two rows {label}")
        if label in devices:
            rows[label], cells[label] = line, _cells(command, label, devices, found, is_cell)
        elif label.startswith("GPU"):
            raise ParseError(command, f"there is a row {label[:20]}, but no such column")
    gpus = [device for device in devices if _GPU.fullmatch(device)]
    if missing := [gpu for gpu in gpus if gpu not in rows]:
        raise ParseError(command, f"there is no row {missing[0]}")
    return _Matrix(lines[top], devices, [rows[gpu] for gpu in gpus], [cells[gpu] for gpu in gpus])


def _devices(command: str, header: str) -> list[str]:
    """The columns before `CPU Affinity`: GPUs by number, then NICs by number or, from old drivers, by name."""
    devices = header.split("CPU Affinity")[0].split()
    if odd := [device for device in devices if not _DEVICE.fullmatch(device)]:
        raise ParseError(command, f"its header names {odd[0][:20]}, which is no device: were tabs lost?")
    gpus = [device for device in devices if _GPU.fullmatch(device)]
    if devices[: len(gpus)] != [f"GPU{i}" for i in range(len(gpus))] or len(set(devices)) < len(devices):
        raise ParseError(command, "its columns are not GPU0, GPU1 and so on, and then the NICs")
    return devices


def _cells(command: str, label: str, devices: list[str], found: list[str], is_cell: Callable[[str], bool]) -> list[str]:
    """The row's cells, one a device. They hold no spaces, so both tabs and columns of spaces part them."""
    row = found[: len(devices)]
    for device, cell in zip(devices, row, strict=False):
        if not (cell == "X" if device == label else is_cell(cell)):
            raise ParseError(command, f"row {label} says {cell[:20]} below {device}: were tabs lost?")
    if len(row) < len(devices):
        raise ParseError(command, f"row {label} has {len(row)} cells for {len(devices)} devices")
    return row


def _numa_nodes(matrix: _Matrix) -> dict[int, int]:
    """From the column `NUMA Affinity`. Within a cpuset the column before it is empty, so only tabs can be trusted."""
    tabs = "\t" in matrix.header
    titles = _tail(matrix.header, matrix.header.find("CPU Affinity"), tabs)
    if "NUMA Affinity" not in titles:
        return {}
    column = titles.index("NUMA Affinity")
    nodes = {}
    for gpu, row in enumerate(matrix.rows):
        tail = (row.split("\t") if tabs else row.split())[1 + len(matrix.devices) :]
        whole = len(tail) > column if tabs else len(tail) == len(titles)
        node = whole_number(tail[column].strip()) if whole else None
        if node is not None:
            nodes[gpu] = node
    return nodes


def _tail(header: str, start: int, tabs: bool) -> list[str]:
    if start < 0:
        return []
    return [title.strip() for title in re.split(r"\t+" if tabs else r" {2,}", header[start:].strip())]
