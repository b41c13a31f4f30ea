"""One model over two hosts: the tokens of one machine, a lost node named in time, and a way back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx import LLM, SamplingParams
from tests.brake import braked
from tests.cluster.hosts import FAR, HEAD, SECRETS, SOURCE, Host, Hosts, two_hosts, why_not
from tests.conftest import make_checkpoint
from tests.server.conftest import add_tokenizer
from tests.server.running import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
START_S = 300
PROMPT = "abc"
SHORT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 480}
BRAKES = """
import sys
if "phalanx.server.engine_process" in sys.orig_argv:
    from pathlib import Path
    from tests.brake import obey
    obey(Path({!r}))
"""
"""What an engine does on its way up. The ranks do not."""


class ClusterServer:
    """`phalanx serve --executor ray` on the near host, over both."""

    def __init__(self, hosts: Hosts, model: Path, folder: Path) -> None:
        self.hosts = hosts
        self.log = folder / "server.log"
        self.brake = folder / "brake"
        self._lives = 0
        (folder / "sitecustomize.py").write_text(BRAKES.format(str(self.brake)))
        path = os.pathsep.join(map(str, (folder, SOURCE.parent, SOURCE)))
        command = [sys.executable, "-m", "phalanx.cli", "serve", str(model), "--port", "0", "--tp", "2"]
        options = ["--executor", "ray", "--restart", "5", "--served-model-name", "tiny", "--warm-up", "off"]
        self.process = hosts.near.start(*command, *options, log=self.log, PYTHONPATH=path, **SECRETS)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_until_ready(self) -> None:
        """For the engine's next life: the server announces each."""
        self._lives += 1
        assert eventually(lambda: self.process.poll() is not None or len(self._urls()) == self._lives, START_S)
        assert self.process.poll() is None, self.text

    def _urls(self) -> list[str]:
        return re.findall(r"serves \S+ at (\S+)/v1 ", self.text)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        return self.hosts.near.ask(self._urls()[0] + path, body)

    def health(self) -> tuple[int, dict[str, Any]]:
        return self.ask("/health")

    def worker(self) -> psutil.Process:
        (worker,) = self.hosts.far.processes("runtime.worker")
        return worker

    def steps(self) -> int:
        return self.health()[1]["ranks"][0]["step"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_cluster")
    make_checkpoint("llama", folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def answer_of_one(model: Path) -> str:
    """What one machine answers."""
    with LLM(model, tp=1, progress=False) as llm:
        return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)).text


@pytest.fixture(scope="module")
def server(hosts: Hosts, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServer]:
    started = ClusterServer(hosts, model, tmp_path_factory.mktemp("cluster"))
    started.wait_until_ready()
    yield started
    started.process.terminate()
    started.process.wait(60)


def answer(server: ClusterServer) -> str:
    status, body = server.ask("/v1/completions", SHORT)
    assert status == 200, body
    return body["choices"][0]["text"]


def test_two_hosts_answer_as_one_does_and_health_names_them(server: ClusterServer, answer_of_one: str) -> None:
    assert answer(server) == answer_of_one
    status, health = server.health()
    assert status == 200
    assert [rank["node"].split()[-1] for rank in health["ranks"]] == [f"({HEAD})", f"({FAR})"]


def test_no_secret_of_the_engine_or_of_the_ray_node_reaches_a_rank(server: ClusterServer) -> None:
    variables = server.worker().environ()
    assert not set(SECRETS) & set(variables)
    assert not [name for name, value in variables.items() if "secret" in value or name.startswith("RAY_")]
    assert variables["OMP_NUM_THREADS"] == "1"


def test_ranks_listen_on_the_chosen_address_alone(server: ClusterServer) -> None:
    listening = _listeners(server.hosts.far, server.worker().pid)
    assert listening
    assert {address.rpartition(":")[0] for address in listening} == {FAR}


def _listeners(host: Host, pid: int) -> list[str]:
    listed = subprocess.run(["ss", "-Htlnp", "-N", host.name], capture_output=True, text=True, check=True)
    return [line.split()[3] for line in listed.stdout.splitlines() if f"pid={pid}," in line]


def test_a_cut_link_is_reported_in_time_and_a_mended_one_serves_again(
    server: ClusterServer, answer_of_one: str
) -> None:
    lost(server, server.hosts.cut)
    assert eventually(lambda: not server.hosts.far.processes("runtime.worker"), 60), "the far rank stayed"
    server.hosts.mend()
    server.wait_until_ready()
    assert answer(server) == answer_of_one


def test_a_killed_node_is_reported_in_time_and_a_new_one_takes_its_place(
    server: ClusterServer, answer_of_one: str
) -> None:
    lost(server, server.hosts.far.kill_everything)
    server.hosts.far.ray_node()
    server.wait_until_ready()
    assert answer(server) == answer_of_one


def lost(server: ClusterServer, happens: Any) -> None:
    """While a request runs, the far host goes: the request ends with an error in seconds, and the node is named.

    Steps are told late: only more than the request before it had are surely its own, and one without a token would run
    again.
    """
    before = server.steps()
    with ThreadPoolExecutor(1) as pool, braked(server.brake):
        running = pool.submit(server.ask, "/v1/completions", LONG)
        assert eventually(lambda: server.steps() > before + SHORT["max_tokens"] + 4, 60)
        happens()
        status, body = running.result(60)
    assert (status, body["error"]["code"]) == (500, "node_lost")
    status, health = server.health()
    assert status == 503
    assert health["last_death"]["code"] == "node_lost"
    assert re.search(rf"Rank 1 on \S+ \({FAR}\) gave no sign of life", health["last_death"]["found"])
    assert server.ask("/v1/completions", SHORT)[0] == 503


def test_a_stopped_server_leaves_no_rank_behind(hosts: Hosts, server: ClusterServer) -> None:
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert eventually(lambda: not hosts.far.processes("runtime.worker"), 60)
