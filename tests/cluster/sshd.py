"""A private sshd on a loopback port, with keys of its own: another machine, as far as ssh can tell."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

_SEPARATION = Path("/run/sshd")
_START_S = 30
NAME = "box"
"""The host that the configuration knows it by."""


def sshd() -> str | None:
    """The program, where it and what makes its keys are installed."""
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    return program if shutil.which("ssh-keygen") else None


@contextmanager
def private_sshd(folder: Path) -> Iterator[Path]:
    """Runs it; yields an ssh configuration that logs in to it. Skips where there is none."""
    program = sshd()
    if program is None:
        pytest.skip("sshd is not installed")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    port = free_port()
    (folder / "sshd.conf").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/user.pub\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    made = _make_separation_folder()
    log = (folder / "sshd.log").open("w")
    daemon = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "sshd.conf")], stderr=log)
    try:
        _wait(daemon, port, folder / "sshd.log")
        yield _client_config(folder, port)
    finally:
        daemon.terminate()
        daemon.wait(30)
        log.close()
        if made:
            _SEPARATION.rmdir()


def _make_separation_folder() -> bool:
    """sshd demands it of root, and only a service would make it."""
    if os.geteuid() != 0 or _SEPARATION.exists():
        return False
    _SEPARATION.mkdir(mode=0o755)
    return True


def _wait(daemon: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if daemon.poll() is not None:
            pytest.skip(f"sshd does not run here: {log.read_text().strip()}")
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail(f"sshd did not listen: {log.read_text()}")


def _client_config(folder: Path, port: int) -> Path:
    kind, key = (folder / "host.pub").read_text().split()[:2]
    (folder / "known").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    path = folder / "ssh.conf"
    path.write_text(
        f"Host {NAME}\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {folder}/user\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking yes\n"
    )
    return path
