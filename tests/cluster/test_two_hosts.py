"""One model over two hosts: the tokens of one machine, a lost node named in time, and a way back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from phalanx import LLM, SamplingParams
from phalanx.doctor.live import Picture, findings_of, picture_of
from phalanx.trace.perfetto import records_of
from tests.cluster.hosts import FAR, HEAD, SECRETS, Host, Hosts, two_hosts, why_not
from tests.conftest import make_checkpoint
from tests.server.conftest import add_tokenizer
from tests.server.running import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
START_S = 300
PROMPT = "abc"
SHORT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 480}


class ClusterServer:
    """`phalanx serve --executor ray` on the near host, over both."""

    def __init__(self, hosts: Hosts, model: Path, log: Path) -> None:
        self.hosts = hosts
        self.log = log
        self._lives = 0
        command = [sys.executable, "-m", "phalanx.cli", "serve", str(model), "--port", "0", "--tp", "2"]
        options = ["--executor", "ray", "--restart", "5", "--served-model-name", "tiny", "--warm-up", "off"]
        self.process = hosts.near.start(*command, *options, log=log, **SECRETS)

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
    started = ClusterServer(hosts, model, tmp_path_factory.mktemp("cluster") / "server.log")
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


def test_a_link_at_half_speed_is_found_in_a_trace(server: ClusterServer) -> None:
    """Beside what the same ranks told of it before: nobody has a model of this cable."""
    before, after = traced(server, "4mbit"), traced(server, "2mbit")
    assert codes(replace(before, exchange_expected=before.exchanged)) == set()
    assert codes(replace(after, exchange_expected=before.exchanged)) == {"slow_link"}


def codes(seen: Picture) -> set[str]:
    return {finding.code for finding in findings_of(seen)} & {"slow_link", "slow_rank"}


def traced(server: ClusterServer, rate: str) -> Picture:
    """Steps of sixteen rows: all but a few milliseconds of them are the cable's."""
    if (reason := server.hosts.limit(rate)) is not None:
        pytest.skip(f"no slower links here: {reason}")
    try:
        with ThreadPoolExecutor(1) as pool:
            trace = pool.submit(server.ask, "/trace", {"steps": 5, "seconds": 60})
            many = SHORT | {"prompt": [PROMPT] * 16, "max_tokens": 8}
            while not trace.done():
                assert server.ask("/v1/completions", many)[0] == 200
            status, told = trace.result()
    finally:
        server.hosts.unlimit()
    assert status == 200, told
    return picture_of(records_of(json.dumps(told).encode()))


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
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.ask, "/v1/completions", LONG)
        assert eventually(lambda: server.steps() > before + SHORT["max_tokens"] + 4, 60)
        happens()
        status, body = running.result(30)
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
