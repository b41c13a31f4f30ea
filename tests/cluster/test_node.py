"""What runs on a node: tokens are kept from others, and only this cluster's processes end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.cluster.commands import MARK
from phalanx.cluster.node import keep_token, look, processes_of, stop


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def sleeper(folder: Path | None, code: str = "") -> subprocess.Popen[bytes]:
    """A process of this folder; it has begun to sleep when this returns."""
    environment = {**os.environ, **({MARK: str(folder)} if folder else {})}
    words = [sys.executable, "-c", f"{code}\nprint(flush=True)\nimport time; time.sleep(600)"]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_stop_ends_the_processes_of_its_folder_and_no_others(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    mine = sleeper(tmp_path / "a")
    stubborn = sleeper(tmp_path / "a", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    other, longer, unmarked = sleeper(tmp_path / "b"), sleeper(tmp_path / "a/b"), sleeper(None)
    sleepers += [mine, stubborn, other, longer, unmarked]
    assert {process.pid for process in processes_of(tmp_path / "a")} == {mine.pid, stubborn.pid}
    assert stop(tmp_path / "a").ended == 2
    assert mine.poll() is not None
    assert stubborn.poll() is not None
    assert other.poll() is longer.poll() is unmarked.poll() is None
    assert stop(tmp_path / "a").ended == 0


def test_children_that_lost_the_mark_end_with_their_parent(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    child = f"import os, subprocess, sys; os.environ.pop({MARK!r}); subprocess.Popen(['sleep', '600'])"
    sleepers.append(sleeper(tmp_path, child))
    assert len(processes_of(tmp_path)) == 2
    assert stop(tmp_path).ended == 2
    deadline = time.monotonic() + 30
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []


def test_a_token_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "cluster" / "10.0.0.1"
    keep_token(folder, "first")
    keep_token(folder, "second")
    assert (folder / "token").read_text() == "second"
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == ["token"]


def test_a_folder_others_can_write_in_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(SystemExit, match="Other users can write"):
        keep_token(tmp_path / "open" / "10.0.0.1", "secret")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SystemExit, match="Other users can write"):
        keep_token(tmp_path / "link", "secret")
    (tmp_path / "open").chmod(0o1777)
    keep_token(tmp_path / "open" / "10.0.0.1", "secret")


@pytest.mark.parametrize("token", ["", "x" * 5000])
def test_no_token_is_refused(tmp_path: Path, token: str) -> None:
    with pytest.raises(SystemExit, match="No token"):
        keep_token(tmp_path / "a", token)


def test_a_look_at_this_machine(tmp_path: Path) -> None:
    found = look("lo", tmp_path)
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.nic is not None
    assert "127.0.0.1" in found.nic.addresses
    assert (found.address, found.processes) == (None, 0)
    assert look("no-such-if0", tmp_path).nic is None


def test_a_stale_address_file_is_not_a_running_node(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert look("lo", tmp_path).address is None
