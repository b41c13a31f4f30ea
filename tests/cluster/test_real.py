"""Real Ray nodes on this machine, started as on any other: two without ssh, and one over a real ssh."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

import phalanx
from phalanx.cli import app
from phalanx.cluster import commands
from phalanx.cluster.hosts import Cluster, read_hosts
from phalanx.cluster.node import processes_of
from phalanx.cluster.remote import run
from tests.cluster.sshd import NAME, private_sshd, sshd
from tests.ports import free_port

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ODD = 'it\'s "odd"; $HOME `id` *'
"""Would not reach Ray whole if a shell on the way read it."""
HOSTS = """
[cluster]
interface = "lo"
port = {port}
python = "{python}"
folder = "{folder}"
token_file = "token"
ssh_config = "ssh.conf"
environment = {{ PYTHONPATH = "{source}", ODD = {odd} }}

[[node]]
host = "local"
ip = "127.0.0.2"
head = true
ranks = 1

[[node]]
host = "{host}"
ip = "127.0.0.3"
ranks = 1
"""


@dataclass(frozen=True)
class Place:
    """A folder with a hosts.toml, short enough for Ray's sockets."""

    folder: Path

    @property
    def cluster(self) -> Cluster:
        return read_hosts(self.folder / "hosts.toml")

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(app, ["cluster", *words, "--nodes", str(self.folder / "hosts.toml")])

    def pids(self) -> list[set[int]]:
        return [{process.pid for process in processes_of(Path(node.folder))} for node in self.cluster.nodes]


def write_hosts(folder: Path, host: str, **changed: str) -> None:
    told = {
        "port": str(free_port("127.0.0.2")),
        "python": sys.executable,
        "folder": str(folder),
        "source": str(Path(phalanx.__file__).parents[1]),
        "odd": json.dumps(ODD),
        "host": host,
    }
    (folder / "hosts.toml").write_text(HOSTS.format(**told | changed))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="phx", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def box(short_folder: Path) -> Iterator[Place]:
    """The second node is behind ssh."""
    with private_sshd(short_folder):
        write_hosts(short_folder, NAME)
        yield Place(short_folder)


@pytest.fixture
def place(request: pytest.FixtureRequest, short_folder: Path) -> Iterator[Place]:
    """The head is started without ssh, the second node too where there is no sshd."""
    if sshd() is not None:
        found = request.getfixturevalue("box")
    else:
        write_hosts(short_folder, "local")
        found = Place(short_folder)
    try:
        yield found
    finally:
        if any(found.pids()):
            found.run("down")


class Watch:
    """Looks at the command line of every process, again and again, for words that must not be there."""

    def __init__(self, secret: str) -> None:
        self.seen: set[str] = set()
        self.lines = 0
        self._secret = secret
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    line = Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                self.lines += "ray.scripts.scripts" in line
                if self._secret in line:
                    self.seen.add(line)


def test_up_status_up_again_another_token_and_down(place: Place) -> None:
    token = "5ec2e7" * 10
    (place.folder / "token").write_text(token)
    (place.folder / "token").chmod(0o600)
    with Watch(token) as watch:
        result = place.run("up")
    assert result.exit_code == 0, result.output
    assert watch.lines > 0
    assert not watch.seen
    assert token not in result.output
    assert "--executor ray --ray-address 127.0.0.2:" in result.output

    found = json.loads(place.run("status", "--json").output)
    assert [(node["ip"], node["state"], node["ranks"]) for node in found["nodes"]] == [
        ("127.0.0.2", "up", [0]),
        ("127.0.0.3", "up", [1]),
    ]
    before = place.pids()
    assert all(before)
    assert _variable("ODD", before[1]) == {ODD}
    assert _variable("GLOO_SOCKET_IFNAME", before[1]) == {"lo"}
    assert not any(_variable("RAY_AUTH_TOKEN", pids) for pids in before)

    again = place.run("up")
    assert again.exit_code == 0, again.output
    assert again.output.count("is up already") == 2
    assert all(old <= new for old, new in zip(before, place.pids(), strict=True))

    no_node_with_another_token_is_let_in(place)

    assert place.run("down").exit_code == 0
    assert place.pids() == [set(), set()]
    assert place.run("status").exit_code == 1
    assert place.run("down").output.count("was not up") == 2


def no_node_with_another_token_is_let_in(place: Place) -> None:
    """And the failed up leaves the head alone, which was up before. Ray would try for twenty seconds."""
    head, _ = place.pids()
    run(place.cluster, commands.stop(place.cluster.nodes[1]))
    hosts = place.folder / "hosts.toml"
    hosts.write_text(hosts.read_text().replace("{ PYTHONPATH", '{ RAY_NUM_REDIS_GET_RETRIES = "2", PYTHONPATH'))
    (place.folder / "token").write_text("0" * 64)
    failed = place.run("up")
    assert failed.exit_code == 1
    assert "(127.0.0.3): could not start Ray" in failed.output
    assert "started with another token" in failed.output
    assert head <= place.pids()[0]
    assert place.pids()[1] == set()


def _variable(name: str, pids: set[int]) -> set[str]:
    """Its values in the environments of raylets among these processes."""
    found = set()
    for pid in pids:
        if Path(psutil.Process(pid).cmdline()[0]).name == "raylet" and name in psutil.Process(pid).environ():
            found.add(psutil.Process(pid).environ()[name])
    return found


def test_an_ssh_that_does_not_answer_is_told(box: Place) -> None:
    config = box.folder / "ssh.conf"
    lines = config.read_text().splitlines()
    config.write_text("\n".join(f"  Port {free_port()}" if "Port" in line else line for line in lines))
    result = box.run("up")
    assert result.exit_code == 1
    assert f"error ssh_failed: {NAME} (127.0.0.3): could not look at the machine" in result.output
    assert "Connection refused" in result.output
    assert "$ ssh -T -o BatchMode=yes" in result.output
    assert f"Try: ssh {NAME} true" in result.output


def test_a_host_key_that_is_not_known_is_not_accepted(box: Place) -> None:
    (box.folder / "known").write_text("")
    result = box.run("up")
    assert "error ssh_failed" in result.output
    assert "Host key verification failed" in result.output


def test_a_python_that_is_not_there_is_told_alike_here_and_over_ssh(box: Place) -> None:
    write_hosts(box.folder, NAME, python="/no where/python")
    result = box.run("up")
    assert result.exit_code == 1
    for node in ("local (127.0.0.2)", f"{NAME} (127.0.0.3)"):
        assert f"{node}: could not look at the machine, its versions and its link: there is no /no where/python." in (
            result.output
        )
    assert "correct python in hosts.toml" in result.output


def test_a_python_without_phalanx_is_told(box: Place) -> None:
    plain = getattr(sys, "_base_executable", sys.executable)
    write_hosts(box.folder, NAME, python=plain, source="/nowhere")
    result = box.run("up")
    assert "error not_installed" in result.output
    assert "-m pip install 'phalanx[cluster] @ URL'" in result.output


def test_another_ray_version_over_ssh_is_refused(box: Place) -> None:
    """By a Python that changes nothing but the version it finds."""
    fake = box.folder / "python"
    fake.write_text(
        f"#!{sys.executable}\nimport sys\nfrom phalanx.cluster import node\n"
        "node._ray_version = lambda: '2.59.1'\nsys.argv = ['node', *sys.argv[3:]]\nnode.main()\n"
    )
    fake.chmod(0o755)
    text = (box.folder / "hosts.toml").read_text()
    (box.folder / "hosts.toml").write_text(text + f'python = "{fake}"\n')
    result = box.run("up")
    assert "error versions_differ" in result.output
    assert f"{NAME} (127.0.0.3) 2.59.1" in result.output
    assert box.pids() == [set(), set()]
