"""`nvidia-smi -L`, `nvlink --status` and `nvlink -e`: lists that begin each GPU with its name and UUID."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.doctor.facts import NvLink
from phalanx.doctor.gather.smi.text import ParseError, lines_of, whole_number

_LISTING = "nvidia-smi -L"
_STATUS = "nvidia-smi nvlink --status"
_ERRORS = "nvidia-smi nvlink -e"
_GPU = re.compile(r"GPU ([0-9]{1,3}): (\S.*?) \(UUID: (GPU-[0-9a-f-]{36})\)")
_MIG = re.compile(r"\s+MIG (\S+)\s+Device\s+([0-9]{1,2}): \(UUID: (MIG-\S+)\)")
_LINK = re.compile(r"\s*Link ([0-9]{1,2}): (\S.*)")
_SPEED = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,4})?) GB/s")
_ALL_INACTIVE = re.compile(r"NVML: Unable to retrieve NVLink information as all links are inactive", re.IGNORECASE)
_COUNTED = {"Replay Errors", "Recovery Errors", "CRC Errors"}


@dataclass(frozen=True)
class Listed:
    """A GPU as `nvidia-smi -L` lists it, and the profiles of its MIG slices."""

    index: int
    name: str
    uuid: str
    slices: tuple[str, ...] = ()


def parse_listing(text: str) -> list[Listed]:
    """Reads `nvidia-smi -L`. A GPU with slices has MIG on; one without may have it on too."""
    gpus = []
    for title, lines in _sections(_LISTING, text):
        slices: list[str] = []
        for line in lines:
            part = _MIG.fullmatch(line)
            if part is None or int(part[2]) != len(slices):
                raise ParseError(_LISTING, f"GPU {title[1]} has the line {line.strip()[:60]!r}")
            slices.append(part[1])
        gpus.append(Listed(int(title[1]), title[2], title[3], tuple(slices)))
    return gpus


def parse_links(text: str) -> dict[int, tuple[NvLink, ...]]:
    """Reads `nvlink --status`: the links of each GPU that it names.

    No link is listed for a GPU that has none, nor by some drivers for one whose links are all inactive.
    """
    links = {}
    for title, lines in _sections(_STATUS, text):
        found: list[NvLink] = []
        if not (len(lines) == 1 and _ALL_INACTIVE.fullmatch(lines[0].strip())):
            for line in lines:
                found.append(_link(int(title[1]), line, len(found)))
        links[int(title[1])] = tuple(found)
    return links


def _link(gpu: int, line: str, expected: int) -> NvLink:
    match = _LINK.fullmatch(line.rstrip())
    if match is None or int(match[1]) != expected:
        raise ParseError(_STATUS, f"GPU {gpu} has the line {line.strip()[:60]!r} where link {expected} is due")
    if match[2].lower() in ("<inactive>", "inactive"):
        return NvLink(expected, active=False)
    speed = _SPEED.fullmatch(match[2])
    if speed is None:
        raise ParseError(_STATUS, f"GPU {gpu} says {match[2][:40]!r} of link {expected}")
    gbs = float(speed[1])
    return NvLink(expected, active=gbs > 0, gbs=gbs)


def parse_link_errors(text: str) -> dict[int, dict[int, int]]:
    """Reads `nvlink -e`: by GPU and link the sum of replays, recoveries and CRC errors, where all three are told."""
    errors: dict[int, dict[int, int]] = {}
    for title, lines in _sections(_ERRORS, text):
        counts: dict[int, dict[str, int | None]] = {}
        for line in lines:
            match = _LINK.fullmatch(line.rstrip())
            if match is None:
                raise ParseError(_ERRORS, f"GPU {title[1]} has the line {line.strip()[:60]!r}")
            name, _, value = match[2].partition(": ")
            of_link = counts.setdefault(int(match[1]), {})
            if name in of_link:
                raise ParseError(_ERRORS, f"GPU {title[1]} counts {name} of link {match[1]} twice")
            of_link[name] = whole_number(value.strip())
        errors[int(title[1])] = {
            link: sum(known)
            for link, of_link in counts.items()
            if len(known := [count for name in _COUNTED if (count := of_link.get(name)) is not None]) == len(_COUNTED)
        }
    return errors


def _sections(command: str, text: str) -> list[tuple[re.Match[str], list[str]]]:
    """Each GPU's first line, matched, and the lines that follow it."""
    sections: list[tuple[re.Match[str], list[str]]] = []
    for line in lines_of(command, text):
        if not line.strip():
            continue
        if title := _GPU.fullmatch(line.rstrip()):
            sections.append((title, []))
        elif sections:
            sections[-1][1].append(line)
        else:
            raise ParseError(command, f"it begins with {line.strip()[:60]!r} instead of a GPU")
    for what, values in (("index", [title[1] for title, _ in sections]), ("UUID", [title[3] for title, _ in sections])):
        if len(set(values)) < len(values):
            raise ParseError(command, f"two GPUs have the same {what}")
    return sections
