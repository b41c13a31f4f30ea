"""Two hosts on one machine: network namespaces joined by a pair of virtual network cards, with or without Ray nodes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

SOURCE = Path(__file__).parents[2] / "src"
HEAD, FAR = "10.78.0.1", "10.78.0.2"
SUBNET = "10.78.0.0/24"
PORT = 6379
SECRETS = {"HF_TOKEN": "hf_secret", "AWS_SECRET_ACCESS_KEY": "cloud_secret", "MY_PASSWORD": "plain_secret"}

_CLIENT = """
import json, sys, urllib.error, urllib.request
url, body = sys.argv[1], sys.argv[2].encode() or None
request = urllib.request.Request(url, body, {"content-type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=float(sys.argv[3])) as answer:
        status, text = answer.status, answer.read()
except urllib.error.HTTPError as error:
    status, text = error.code, error.read()
print(json.dumps([status, json.loads(text)]))
"""


def why_not() -> str | None:
    """Why this machine cannot play two hosts."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"phx{os.getpid()}t"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"network namespaces are not permitted: {tried.stderr.strip()}"
    _ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", netns=name, check=False)
    joined = _ip("link", "show", f"{name}a", netns=name, check=False)
    _ip("netns", "del", name)
    return None if joined.returncode == 0 else f"no virtual network cards: {joined.stderr.strip()}"


def _ip(*words: str, netns: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    where = ["-n", netns] if netns else []
    return subprocess.run(["ip", *where, *words], capture_output=True, text=True, check=check)


class Host:
    """A network namespace that holds one end of the cable."""

    def __init__(self, name: str, card: str, address: str, folder: Path, variables: dict[str, str]) -> None:
        self.name = name
        self.card = card
        self.address = address
        self.folder = folder
        self.variables = variables

    def start(self, *command: str, log: Path, **more: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.variables | more,
            )

    def ray_node(self) -> None:
        """Start a Ray node: the head on the first host, else one that joins it."""
        join = ["--head", "--port", str(PORT)] if self.address == HEAD else ["--address", f"{HEAD}:{PORT}"]
        sizes = ["--num-cpus", "1", "--object-store-memory", "80000000", "--temp-dir", str(self.folder)]
        quiet = ["--include-dashboard=false"] if self.address == HEAD else []
        log = self.folder.parent / f"ray-{self.address}.log"
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", self.address]
        node = self.start(*ray, *join, *sizes, *quiet, "--disable-usage-stats", log=log, **SECRETS)
        assert node.wait(180) == 0, log.read_text()

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.name).stdout.split()]

    def processes(self, module: str) -> list[psutil.Process]:
        found = []
        for pid in self.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and any(
                    part.endswith(module) for part in process.cmdline()
                ):
                    found.append(process)
        return found

    def kill_everything(self) -> None:
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def ask(self, url: str, body: dict[str, Any] | None = None, timeout: float = 120) -> tuple[int, dict[str, Any]]:
        """An HTTP request from inside this host: status and body; (0, {}) if there was no answer."""
        words = [sys.executable, "-I", "-c", _CLIENT, url, json.dumps(body) if body else "", str(timeout)]
        done = subprocess.run(["ip", "netns", "exec", self.name, *words], capture_output=True, text=True)
        status, answer = json.loads(done.stdout) if done.returncode == 0 else (0, {})
        return status, answer


class Hosts:
    """The two hosts and the cable between them."""

    def __init__(self, near: Host, far: Host) -> None:
        self.near = near
        self.far = far

    def cut(self) -> None:
        _ip("link", "set", self.far.card, "down", netns=self.far.name)

    def mend(self) -> None:
        _ip("link", "set", self.far.card, "up", netns=self.far.name)

    def shape(self, megabits: int) -> None:
        """From now on the cable carries so much a second each way. The burst makes up for a core that is away."""
        for host in (self.near, self.far):
            words = ["qdisc", "replace", "dev", host.card, "root", "tbf", "rate", f"{megabits}mbit"]
            command = ["tc", "-n", host.name, *words, "burst", "64kb", "limit", "4mb"]
            subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts with a Ray node each."""
    with two_namespaces() as hosts:
        hosts.near.ray_node()
        hosts.far.ray_node()
        yield hosts


@contextlib.contextmanager
def two_namespaces() -> Iterator[Hosts]:
    """Two hosts without anything. Whatever happens, no process, namespace, route or file of them stays behind."""
    names = [f"phx{os.getpid()}{side}" for side in "ab"]
    cards = [f"v{name}" for name in names]
    with tempfile.TemporaryDirectory(prefix="phx-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        variables = _variables()
        near, far = (
            Host(name, card, address, Path(folder) / side, variables)
            for name, card, address, side in zip(names, cards, (HEAD, FAR), "ab", strict=True)
        )
        try:
            _lay_cable(near, far)
            yield Hosts(near, far)
        finally:
            for host in (near, far):
                with contextlib.suppress(subprocess.CalledProcessError):
                    host.kill_everything()
                _ip("netns", "del", host.name, check=False)
            _ip("route", "del", "blackhole", SUBNET, check=False)


def _variables() -> dict[str, str]:
    """Each namespace is half of this machine: one thread a rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {
        "PYTHONPATH": str(SOURCE),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"{HEAD}:{PORT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _lay_cable(near: Host, far: Host) -> None:
    """The blackhole keeps what looks for these addresses outside the namespaces off the real network."""
    _ip("route", "add", "blackhole", SUBNET, check=False)
    for host in (near, far):
        _ip("netns", "add", host.name)
    _ip("link", "add", near.card, "netns", near.name, "type", "veth", "peer", "name", far.card, "netns", far.name)
    for host in (near, far):
        _ip("addr", "add", f"{host.address}/24", "dev", host.card, netns=host.name)
        _ip("link", "set", "lo", "up", netns=host.name)
        _ip("link", "set", host.card, "up", netns=host.name)
