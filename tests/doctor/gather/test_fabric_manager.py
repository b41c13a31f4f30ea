"""The fabric manager: its log, its service, its version, and the switches it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.doctor.facts import FabricManager
from phalanx.doctor.gather.fabric_manager import (
    LogEnd,
    count_switches,
    parse_log,
    parse_service,
    parse_version,
    read_fabric_manager,
)
from phalanx.doctor.gather.smi import ParseError
from tests.doctor.gather.recorded import recorded_host

LOG = """\
[Nov 14 2026 08:00:00] [ERROR] [tid 1] failed to start
[Nov 15 2026 09:00:00] [INFO] [tid 1803] Fabric Manager version 570.86.15 is running with the following options
Message payload details:Team release request
[Nov 15 2026 09:01:00] [INFO] [tid 1808] multicast group 0 is freed.
"""
TROUBLE = "[Nov 15 2026 09:02:00] [ERROR] [tid 7] detected NVSwitch fatal error 12028 on fid 0\n"
SWITCHES = {
    f"/sys/bus/pci/devices/0000:0{i}:00.0/{name}": value
    for i in range(1, 5)
    for name, value in (("vendor", "0x10de\n"), ("class", "0x068000\n"))
} | {"/sys/bus/pci/devices/0000:18:00.0/vendor": "0x10de\n", "/sys/bus/pci/devices/0000:18:00.0/class": "0x030200\n"}


def test_errors_before_the_last_start_are_over() -> None:
    assert parse_log(LOG) == LogEnd("570.86.15", None)
    assert parse_log(LOG + TROUBLE).problem == "Nov 15 2026 09:02:00: detected NVSwitch fatal error 12028 on fid 0"
    assert parse_log("") == LogEnd(None, None)


def test_what_is_no_log_is_refused() -> None:
    with pytest.raises(ParseError, match="no line begins with a time"):
        parse_log("GPU0 X NV18\n")


@pytest.mark.parametrize(
    ("load", "active", "runs"),
    [
        ("loaded", "active", True),
        ("loaded", "failed", False),
        ("loaded", "inactive", False),
        ("not-found", "inactive", False),
    ],
)
def test_the_service(load: str, active: str, runs: bool) -> None:
    assert parse_service(f"LoadState={load}\nActiveState={active}\n") is runs


def test_a_service_that_says_nothing_is_refused() -> None:
    for text in ("", "LoadState=loaded\n", "ActiveState=active\n"):
        with pytest.raises(ParseError, match="no LoadState or no ActiveState"):
            parse_service(text)


def test_the_version() -> None:
    assert parse_version("\nFabric Manager version is : 535.161.08\n") == "535.161.08"
    with pytest.raises(ParseError, match="names no version"):
        parse_version("usage:")


def test_all_of_it_together(tmp_path: Path) -> None:
    files = SWITCHES | {"/var/log/fabricmanager.log": LOG + TROUBLE}
    commands = {
        "systemctl show nvidia-fabricmanager.service": "LoadState=loaded\nActiveState=failed\n",
        "nv-fabricmanager --version": "Fabric Manager version is : 570.86.16\n",
    }
    found = read_fabric_manager(recorded_host(tmp_path, files, commands))
    assert found == FabricManager(False, "570.86.16", 4, "Nov 15 2026 09:02:00: " + TROUBLE.split("] ")[-1].strip())


def test_without_its_program_the_log_tells_the_version(tmp_path: Path) -> None:
    files = {"/var/log/fabricmanager.log": LOG, "/proc/900/comm": "nv-fabricmanage\n"}
    assert read_fabric_manager(recorded_host(tmp_path, files)) == FabricManager(True, "570.86.15", None, None)


def test_in_a_container_nothing_can_be_told(tmp_path: Path) -> None:
    assert read_fabric_manager(recorded_host(tmp_path, SWITCHES)) == FabricManager(None, None, 4, None)


def test_a_broken_log_is_said(tmp_path: Path) -> None:
    host = recorded_host(tmp_path, {"/var/log/fabricmanager.log": "garbage\n"})
    assert read_fabric_manager(host) == FabricManager()
    assert host.unread == ["fabricmanager.log cannot be understood: no line begins with a time, a level and a thread."]


def test_gpus_are_no_switches(tmp_path: Path) -> None:
    assert count_switches(recorded_host(tmp_path, SWITCHES)) == 4
    assert count_switches(recorded_host(tmp_path / "none")) is None
