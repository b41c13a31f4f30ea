"""What runs on a node: `python -m phalanx.cluster.node probe|token|stop|members`. Answers are JSON, one line."""

from __future__ import annotations

import argparse
import os
import platform
import socket
import stat
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec

from phalanx.cluster.commands import MARK
from phalanx.doctor.facts import Nic
from phalanx.version import __version__

_LONGEST_TOKEN = 4096
_RANK_PATIENCE_S = 15.0
_KILL_PATIENCE_S = 15.0
_POLL_S = 0.5


class Probe(msgspec.Struct, frozen=True):
    """A node as it was found. `address`: the head its Ray belongs to, where Ray runs in the folder."""

    hostname: str
    python: str
    phalanx: str
    ray: str | None
    nic: Nic | None
    gpus: tuple[str, ...]
    address: str | None
    processes: int


class Member(msgspec.Struct, frozen=True):
    """A node that Ray counts as alive."""

    ip: str
    gpus: float
    cpus: float


class Stopped(msgspec.Struct, frozen=True):
    """How many processes ended."""

    ended: int


def look(interface: str, folder: Path) -> Probe:
    """Versions, the interface, the GPUs, and whether Ray runs in the folder."""
    running = processes_of(folder)
    return Probe(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        phalanx=__version__,
        ray=_ray_version(),
        nic=_nic(interface),
        gpus=_gpu_names(),
        address=_address_of(folder) if any(map(_is_raylet, running)) else None,
        processes=len(running),
    )


def processes_of(folder: Path) -> list[Any]:
    """Processes that were started for this folder: Ray's own, its workers, and whatever those started."""
    import psutil

    found = {}
    for process in psutil.process_iter():
        try:
            if _is_marked(process, folder):
                for each in (process, *process.children(recursive=True)):  # a changed title may overwrite the mark
                    found[each.pid] = each
        except (OSError, psutil.Error):
            continue
    return [process for process in found.values() if _lives(process)]


def _is_marked(process: Any, folder: Path) -> bool:
    """By its first environment; psutil's own environ() ends at the hole that a changed title leaves in it."""
    return f"{MARK}={folder}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")


def _lives(process: Any) -> bool:
    import psutil

    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def stop(folder: Path) -> Stopped:
    """End them all, and no other Ray process of the machine.

    The raylet first: it says good-bye to the head, ends its ranks and gives them time to free their GPUs. The services
    that are left hold nothing; the head's would wait for ever on SIGTERM.
    """
    import psutil

    running = processes_of(folder)
    seen = {process.pid for process in running}
    raylets = [process for process in running if _is_raylet(process)]
    ranks = [child for raylet in raylets for child in _children(raylet)]
    for raylet in raylets:
        _signal(raylet, "terminate")
    psutil.wait_procs([*raylets, *ranks], timeout=_RANK_PATIENCE_S)
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while alive := processes_of(folder):
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(alive)} processes do not end: {', '.join(str(each.pid) for each in alive)}.")
        for process in alive:
            _signal(process, "kill")
            seen.add(process.pid)
        psutil.wait_procs(alive, timeout=_POLL_S)
    return Stopped(ended=len(seen))


def _children(process: Any) -> list[Any]:
    import psutil

    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _signal(process: Any, how: Literal["terminate", "kill"]) -> None:
    import psutil

    with suppress(psutil.NoSuchProcess):
        getattr(process, how)()


def keep_token(folder: Path, token: str) -> None:
    """Write the token where only this user can read it. A folder that is not this user's own is refused."""
    if not token or len(token) > _LONGEST_TOKEN:
        raise SystemExit("No token came over standard input.")
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_owned(folder)
    _check_owned(folder.parent)
    folder.chmod(0o700)
    handle, name = tempfile.mkstemp(dir=folder)  # mode 600
    with os.fdopen(handle, "w") as file:
        file.write(token)
    os.replace(name, folder / "token")


def _check_owned(folder: Path) -> None:
    """Nobody else may replace what is in it: it is this user's or root's, and others cannot write or it is sticky."""
    found = folder.lstat()
    is_safe = found.st_mode & stat.S_ISVTX or not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or not is_safe:
        raise SystemExit(f"Other users can write in {folder}: remove it, or choose another folder in hosts.toml.")


def members(address: str, expected: set[str], patience_s: float) -> list[Member]:
    """Nodes Ray counts as alive, as soon as the `expected` addresses are among them, or when patience is over."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="error", configure_logging=False)
    deadline = time.monotonic() + patience_s
    while True:
        alive = [
            Member(node["NodeManagerAddress"], node["Resources"].get("GPU", 0.0), node["Resources"].get("CPU", 0.0))
            for node in ray.nodes()
            if node["Alive"]
        ]
        if expected <= {member.ip for member in alive} or time.monotonic() > deadline:
            return alive
        time.sleep(_POLL_S)


def _program(process: Any) -> str:
    import psutil

    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def _is_raylet(process: Any) -> bool:
    return Path(_program(process)).name == "raylet"


def _address_of(folder: Path) -> str | None:
    """Ray writes where its head is beside its sessions."""
    try:
        return (folder / "ray" / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


def _ray_version() -> str | None:
    try:
        return version("ray")
    except PackageNotFoundError:
        return None


def _nic(name: str) -> Nic | None:
    import psutil

    found = psutil.net_if_stats().get(name)
    if found is None:
        return None
    addresses = tuple(
        each.address for each in psutil.net_if_addrs().get(name, ()) if each.family == socket.AddressFamily.AF_INET
    )
    return Nic(name=name, up=found.isup, speed_mbps=found.speed or None, mtu=found.mtu, addresses=addresses)


def _gpu_names() -> tuple[str, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    except pynvml.NVMLError:
        return ()
    return tuple(name.decode() if isinstance(name, bytes) else name for name in names)


def main() -> None:
    told = _parser().parse_args()
    try:
        answer = _act(told)
    except OSError as error:
        raise SystemExit(str(error)) from None
    print(msgspec.json.encode(answer).decode(), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m phalanx.cluster.node")
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("probe", "token", "stop"):
        actions.add_parser(action).add_argument("--folder", type=Path, required=True)
    actions.choices["probe"].add_argument("--interface", required=True)
    counting = actions.add_parser("members")
    counting.add_argument("--address", required=True)
    counting.add_argument("--expect", nargs="*", default=[], metavar="IP")
    counting.add_argument("--patience", type=float, default=0)
    return parser


def _act(told: argparse.Namespace) -> object:
    if told.action == "probe":
        return look(told.interface, told.folder)
    if told.action == "token":
        keep_token(told.folder, sys.stdin.read(_LONGEST_TOKEN + 1).strip())
        return None
    if told.action == "stop":
        return stop(told.folder)
    alive = members(told.address, set(told.expect), told.patience)
    missing = [ip for ip in told.expect if ip not in {member.ip for member in alive}]
    if missing:
        raise SystemExit(f"{', '.join(missing)} did not join {told.address} within {told.patience:g} s.")
    return alive


if __name__ == "__main__":
    main()
