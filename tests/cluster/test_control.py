"""Up and down decide by what nodes answer. The nodes here only pretend; real ones are in test_real.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.cluster.control import down, make_token, up
from phalanx.cluster.hosts import Cluster, Node
from phalanx.cluster.remote import ClusterError
from phalanx.cluster.status import status
from tests.cluster.fake_node import ADDRESS, HEAD, WORKER, FakeNode, fake_cluster

Made = tuple[Cluster, FakeNode, FakeNode]
RUNNING = {"address": ADDRESS, "processes": 4}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return fake_cluster(tmp_path)


def quiet(node: Node, words: str) -> None:
    pass


def test_up_looks_hands_the_token_and_starts_the_head_first(made: Made) -> None:
    cluster, head, worker = made
    said: list[tuple[str, str]] = []
    assert up(cluster, lambda node, words: said.append((node.ip, words))) == []
    assert head.asked == ["probe", "token", "start", "members"]
    assert worker.asked == ["probe", "token", "start"]
    assert head.token == worker.token == cluster.token_file.read_text()
    assert said[2:] == [(HEAD, "Ray started, the head"), (WORKER, "Ray started")]
    assert "200 Gb/s MTU 9000" in said[0][1]


def test_up_leaves_nodes_that_are_up(made: Made) -> None:
    cluster, head, worker = made
    head.tell(members=(HEAD, WORKER), **RUNNING)
    worker.tell(**RUNNING)
    up(cluster, quiet)
    assert "start" not in head.asked + worker.asked
    assert "stop" not in head.asked + worker.asked


def test_up_adds_the_node_that_is_missing(made: Made) -> None:
    cluster, head, worker = made
    head.tell(members=(HEAD,), **RUNNING)
    up(cluster, quiet)
    assert "start" not in head.asked
    assert worker.asked == ["probe", "token", "start"]


def test_up_restarts_a_node_the_head_does_not_know(made: Made) -> None:
    """The head was started anew, or the node was cut off too long."""
    cluster, head, worker = made
    head.tell(members=(HEAD,), **RUNNING)
    worker.tell(**RUNNING)
    up(cluster, quiet)
    assert worker.asked == ["probe", "stop", "token", "start"]


def test_up_ends_what_a_lost_head_left(made: Made) -> None:
    cluster, head, worker = made
    head.tell(processes=2)
    worker.tell(**RUNNING)
    up(cluster, quiet)
    assert head.asked == ["probe", "stop", "token", "start", "members"]
    assert worker.asked == ["probe", "stop", "token", "start"]


def test_a_failed_start_names_node_command_and_last_words_and_stops_what_was_started(made: Made) -> None:
    cluster, head, worker = made
    worker.tell(failures={"start": "no route to the head\nat all"})
    with pytest.raises(ClusterError) as failed:
        up(cluster, quiet)
    assert failed.value.code == "command_failed"
    assert failed.value.found.startswith(f"local ({WORKER}): could not start Ray and join the head")
    assert f"  $ env PHALANX_CLUSTER_NODE={cluster.workers[0].folder} RAY_AUTH_MODE=token" in failed.value.found
    assert "  | no route to the head\n  | at all" in failed.value.found
    assert "session_latest/logs" in failed.value.fix
    assert head.asked[-1] == worker.asked[-1] == "stop"


def test_a_failure_leaves_nodes_that_were_up_before(made: Made) -> None:
    cluster, head, worker = made
    head.tell(members=(HEAD,), **RUNNING)
    worker.tell(failures={"start": "it is full"})
    with pytest.raises(ClusterError):
        up(cluster, quiet)
    assert "stop" not in head.asked
    assert worker.asked[-1] == "stop"


def test_nodes_that_do_not_join_are_a_failure(made: Made) -> None:
    cluster, head, worker = made
    head.tell(failures={"members": f"{WORKER} did not join {ADDRESS} within 90 s."})
    with pytest.raises(ClusterError, match=f"{WORKER} did not join"):
        up(cluster, quiet)
    assert head.asked[-1] == worker.asked[-1] == "stop"


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ({"ray": "2.59.0"}, "versions_differ", "ray differs: local (10.0.0.1) 2.60.0, local (10.0.0.2) 2.59.0"),
        ({"python": "3.12.4"}, "versions_differ", "Install python 3.12.3 on every node"),
        ({"phalanx": "0.2.0"}, "versions_differ", "phalanx differs"),
        ({"ray": None}, "versions_differ", "pip install 'phalanx[cluster] @ URL'"),
        ({"gpus": []}, "too_few_gpus", "has 0 GPUs, hosts.toml says 1"),
        ({"nic": None}, "bad_interface", "interface cx0 does not exist"),
        ({"nic": {"name": "cx0", "up": False}}, "bad_interface", "interface cx0 is down"),
        ({"nic": {"name": "cx0", "up": True, "addresses": ["10.0.1.2"]}}, "bad_address", "cx0 has 10.0.1.2"),
        ({"address": "10.9.9.9:6379", "processes": 4}, "other_cluster", "Ray of another cluster (10.9.9.9:6379)"),
    ],
)
def test_nothing_starts_where_a_node_does_not_fit(made: Made, answer: dict[str, Any], code: str, words: str) -> None:
    cluster, head, worker = made
    worker.tell(**answer)
    with pytest.raises(ClusterError) as refused:
        up(cluster, quiet)
    assert refused.value.code == code
    assert words in str(refused.value)
    assert head.asked == worker.asked == ["probe"]


def test_all_problems_are_told_at_once(made: Made) -> None:
    cluster, head, worker = made
    head.tell(gpus=[])
    worker.tell(nic=None, ray="2.59.0")
    with pytest.raises(ClusterError) as refused:
        up(cluster, quiet)
    for words in ("ray differs", f"({HEAD}) has 0 GPUs", f"({WORKER}): interface cx0"):
        assert words in refused.value.found


def test_links_that_differ_or_are_slow_are_warned_of(made: Made) -> None:
    cluster, _, worker = made
    worker.tell(nic={"name": "cx0", "up": True, "speed_mbps": 100_000, "mtu": 1500, "addresses": [WORKER]})
    told = "\n".join(up(cluster, quiet))
    assert f"mtu differs: local ({HEAD}) 9000, local ({WORKER}) 1500" in told
    assert "100000 Mb/s" in told
    assert "set 9000" in told


def test_down_stops_all_it_can_and_tells_what_it_could_not(made: Made) -> None:
    cluster, head, worker = made
    worker.tell(failures={"stop": "2 processes do not end: 17, 18."})
    with pytest.raises(ClusterError, match="17, 18"):
        down(cluster, quiet)
    assert head.asked == worker.asked == ["stop"]


@pytest.mark.parametrize(
    ("head", "worker", "expected"),
    [
        (RUNNING, RUNNING, ["up", "up"]),
        ({}, {}, ["down", "down"]),
        ({}, RUNNING, ["down", "cut off"]),
        (RUNNING, {"address": "10.9.9.9:6379", "processes": 4}, ["up", "other cluster"]),
        (RUNNING, {"failures": {"probe": "Permission denied"}}, ["up", "unreachable"]),
        (RUNNING | {"failures": {"members": "no GCS"}}, RUNNING, ["cut off", "cut off"]),
    ],
)
def test_status_by_what_nodes_answer(
    made: Made, head: dict[str, Any], worker: dict[str, Any], expected: list[str]
) -> None:
    cluster, first, second = made
    first.tell(members=(HEAD, WORKER), **head)
    second.tell(**worker)
    found = status(cluster)
    assert [node.state for node in found.nodes] == expected
    assert found.is_up == (expected == ["up", "up"])
    assert [node.ranks for node in found.nodes] == [(0,), (1,)]
    problems = str([found.problem, *(node.problem for node in found.nodes)])
    for last_words in (*head.get("failures", {}).values(), *worker.get("failures", {}).values()):
        assert last_words in problems


def test_the_table_shows_gpus_link_and_ranks(made: Made, tmp_path: Path) -> None:
    _, head, worker = made
    head.tell(members=(HEAD, WORKER), gpus=["NVIDIA GB10"] * 2, **RUNNING)
    worker.tell(**RUNNING)
    result = CliRunner().invoke(app, ["cluster", "status", "--nodes", str(tmp_path / "hosts.toml")])
    assert result.exit_code == 0, result.output
    for words in (ADDRESS, "2 x NVIDIA GB10", "cx0 200 Gb/s MTU 9000", "2.60.0", "local, head"):
        assert words in result.output
    worker.tell(failures={"probe": "gone"})
    assert CliRunner().invoke(app, ["cluster", "status", "--nodes", str(tmp_path / "hosts.toml")]).exit_code == 1


def test_an_answer_that_is_not_understood_is_told(made: Made) -> None:
    cluster, head, _ = made
    head.tell(processes="many")
    with pytest.raises(ClusterError, match="the answer is not understood"):
        up(cluster, quiet)


def test_a_new_token_is_secret_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    token = make_token(path)
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_token(path) == token


@pytest.mark.parametrize(("text", "mode", "words"), [("abc", 0o644, "chmod 600"), ("", 0o600, "no token")])
def test_a_bad_token_file_is_refused(tmp_path: Path, text: str, mode: int, words: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ClusterError, match=words):
        make_token(path)
