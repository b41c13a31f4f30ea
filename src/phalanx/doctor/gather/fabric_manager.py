"""The fabric manager: the service that NVSwitch boxes before Blackwell need, from systemd, its program and its log."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.doctor.facts import FabricManager
from phalanx.doctor.gather.host import CommandError, Host
from phalanx.doctor.gather.smi.text import ParseError

_LOG = "fabricmanager.log"
_LOG_PATH = "/var/log/fabricmanager.log"
_SERVICE = "nvidia-fabricmanager.service"
_PROCESS = "nv-fabricmanage"
"""The kernel keeps 15 characters of a name."""
_ENTRY = re.compile(r"\[([A-Z][a-z]{2} [ 0-9]\d \d{4} \d\d:\d\d:\d\d)\] \[([A-Z]+)\] \[tid \d+\] (.*)")
_STARTED = re.compile(r"Fabric Manager version ([0-9.]+) is running")
_VERSION = re.compile(r"Fabric Manager version is\s*:\s*([0-9]+(?:\.[0-9]+)+)")
_SEVERE = {"ERROR", "FATAL", "CRITICAL"}
_SWITCHES = "/proc/driver/nvidia-nvswitch/devices"
_SWITCH_BIOS = re.compile(r"BIOS Version:\s*([0-9A-Fa-f.]+)")
_NVIDIA, _SWITCH_CLASS = "0x10de", "0x068000"


@dataclass(frozen=True)
class LogEnd:
    """What the log says of the service's last run: its version, and the last error in words."""

    version: str | None
    problem: str | None


def parse_log(text: str) -> LogEnd:
    """Reads the log, or the end of it. Errors before the last start are over."""
    entries = [entry for line in text.splitlines() if (entry := _ENTRY.match(line))]
    if text.strip() and not entries:
        raise ParseError(_LOG, "no line begins with a time, a level and a thread")
    version = problem = None
    for when, level, words in (entry.groups() for entry in entries):
        if started := _STARTED.search(words):
            version, problem = started[1], None
        elif level in _SEVERE:
            problem = f"{when}: {words.strip()}"
    return LogEnd(version, problem)


def parse_service(text: str) -> bool:
    """Reads `systemctl show --property=LoadState,ActiveState`: whether the service runs."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    load, active = values.get("LoadState"), values.get("ActiveState")
    if not load or not active:
        raise ParseError(f"systemctl show {_SERVICE}", "it names no LoadState or no ActiveState")
    return load == "loaded" and active == "active"


def parse_version(text: str) -> str:
    """Reads `nv-fabricmanager --version`."""
    match = _VERSION.search(text)
    if match is None:
        raise ParseError("nv-fabricmanager --version", "it names no version")
    return match[1]


def count_switches(host: Host) -> int | None:
    """NVSwitches on the PCIe bus: NVIDIA's devices that are bridges of no standard kind."""
    devices = host.entries("/sys/bus/pci/devices")
    if devices is None:
        return None
    folders = [f"/sys/bus/pci/devices/{device}" for device in devices]
    return sum(
        host.text(f"{folder}/vendor") == _NVIDIA and host.text(f"{folder}/class") == _SWITCH_CLASS for folder in folders
    )


def read_fabric_manager(host: Host) -> FabricManager:
    log = _read_log(host)
    try:
        version: str | None = parse_version(host.command("nv-fabricmanager", "--version"))
    except (CommandError, ParseError):
        version = log.version
    return FabricManager(_runs(host), version, count_switches(host), log.problem, switch_firmware(host))


def switch_firmware(host: Host) -> tuple[str, ...]:
    """Of every NVSwitch, as its driver tells."""
    texts = (host.text(f"{_SWITCHES}/{device}/information") or "" for device in host.entries(_SWITCHES) or ())
    return tuple(found[1] for text in texts if (found := _SWITCH_BIOS.search(text)))


def _read_log(host: Host) -> LogEnd:
    text = host.text(_LOG_PATH, end=True)
    if text is None:
        if host.exists(_LOG_PATH):
            host.unread.append(f"The fabric manager's log {_LOG_PATH} may not be read by this user.")
        return LogEnd(None, None)
    try:
        return parse_log(text)
    except ParseError as error:
        host.unread.append(error.found)
        return LogEnd(None, None)


def _runs(host: Host) -> bool | None:
    """By its process, else by systemd. In a container that sees neither, it cannot be told."""
    processes = host.entries("/proc") or ()
    if any(host.text(f"/proc/{process}/comm") == _PROCESS for process in processes if process.isdigit()):
        return True
    try:
        return parse_service(host.command("systemctl", "show", _SERVICE, "--property=LoadState,ActiveState"))
    except (CommandError, ParseError):
        return None
