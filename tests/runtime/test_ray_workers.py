"""What is refused before anything loads on several machines, and how a rank runs in its seat there."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from phalanx import LLM
from phalanx.errors import ConfigError
from phalanx.runtime import child
from phalanx.runtime.channel import Keys, Lookout
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.messages import Meeting, RankAssignment
from phalanx.runtime.placement import RayNode
from phalanx.runtime.pulse import ENGINE_LOST_AFTER_S
from phalanx.runtime.rank import Spot
from phalanx.runtime.ray_cluster import RayCluster
from phalanx.runtime.ray_workers import check_machines, visible_index
from phalanx.runtime.seat import Ended, Posting, Seat, SeatFacts, gather_facts
from phalanx.runtime.worker import _end_in_the_dark
from tests.faults import FAULT
from tests.forked import forked_rank

NODES = [RayNode(f"id{n}", f"10.0.0.{n}", f"spark-{n}", 1, 20, 1, 20) for n in (1, 2)]
FILES = {"config.json": 700, "model-1.safetensors": 5000, "model-2.safetensors": 4000}
VERSIONS = {"phalanx": "1.0", "python": "3.12.3", "torch": "2.11.0"}
HERE = SeatFacts(VERSIONS, "10.0.0.1", ["eth0", "lo"], FILES, "")


def far(**other: object) -> SeatFacts:
    return msgspec.structs.replace(HERE, **{"address": "10.0.0.2"} | other)


def refused(there: SeatFacts, load_format: str = "auto") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_machines(HERE, [HERE, there], NODES, "fast0", load_format)
    return caught.value


def test_machines_that_agree_give_their_addresses() -> None:
    assert check_machines(HERE, [HERE, far()], NODES, None, "auto") == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize("package", ["phalanx", "python", "torch"])
def test_another_version_is_refused_with_both_and_the_node(package: str) -> None:
    error = refused(far(versions=VERSIONS | {package: "0.9"}))
    assert error.code == "versions_differ"
    assert f"spark-2 (10.0.0.2) has {package} 0.9, this machine has {VERSIONS[package]}" in error.found


def test_a_node_without_the_interface_says_which_it_has() -> None:
    error = refused(far(address=None))
    assert error.code == "no_interface"
    assert "spark-2 (10.0.0.2) has no interface fast0" in error.found
    assert "eth0, lo" in error.found


def test_a_node_without_the_model_or_a_part_of_it_is_named() -> None:
    assert "spark-2 (10.0.0.2) lacks config.json, model-1.safetensors, model-2" in refused(far(files={})).found
    part = {name: size for name, size in FILES.items() if name != "model-2.safetensors"}
    assert "lacks model-2.safetensors" in refused(far(files=part)).found
    cut = FILES | {"model-1.safetensors": 4999}
    assert "has another model-1.safetensors" in refused(far(files=cut)).found


def test_random_weights_need_the_configuration_alone() -> None:
    bare = {"config.json": 700}
    assert check_machines(HERE, [HERE, far(files=bare)], NODES, None, "dummy")
    assert refused(far(files={}), "dummy").code == "model_missing"


def test_facts_are_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("not the model's")
    facts = gather_facts(str(tmp_path), "lo", "10.0.0.1")
    assert facts.address == "127.0.0.1"
    assert facts.files == {"config.json": 2}
    assert facts.versions["python"] == sys.version.split()[0]
    assert gather_facts(str(tmp_path), None, "10.0.0.1").address == "10.0.0.1"
    assert gather_facts(str(tmp_path / "nowhere"), "nosuch0", "10.0.0.1").address is None
    assert gather_facts(str(tmp_path / "nowhere"), None, "10.0.0.1").files == {}


@pytest.mark.parametrize(("seen", "given", "index"), [(None, "3", 3), ("2,3", "3", 1), ("GPU-a,GPU-b", "GPU-b", 1)])
def test_rank_0_finds_the_gpu_that_ray_gave_it(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, given: str, index: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert visible_index(given) == index


def test_a_gpu_that_is_hidden_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="Ray gave GPU 3 to rank 0"):
        visible_index("3")


def assignment(model: str, **config: object) -> RankAssignment:
    nobody = "tcp://127.0.0.1:9"
    meeting = Meeting("tcp://127.0.0.1:*", nobody, nobody, "tcp://127.0.0.1:9", "127.0.0.1", beacon=nobody)
    options = EngineConfig(tp=2, executor="ray", device="cpu", **config)  # type: ignore[arg-type]
    return RankAssignment(options, model, 1, Spot(), meeting, "token", engine_key=Keys.make().public)


def run_in_seat(posted: RankAssignment) -> Ended:
    posting = msgspec.json.encode(Posting(posted, {}))
    return msgspec.json.decode(Seat().run(posting), type=Ended)


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_fails_in_its_seat_leaves_its_own_words_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    ended = run_in_seat(assignment(str(tmp_path / "no_model")))
    assert ended.status == 1
    assert ended.failure is not None
    assert ended.failure.rank == 1
    assert "no_model" in ended.failure.error
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_engine_is_not_there_ends_by_itself(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads, reports to nobody, and would wait for orders for ever."""

    def start(module: str, line: bytes, variables: dict[str, str]) -> object:
        return forked_rank(module, line, variables | {FAULT: "impatient 1@1"})

    monkeypatch.setattr(child, "start", start)
    assert run_in_seat(assignment(str(tiny_llama))) == Ended(0, None)


def test_a_pause_of_a_rank_is_not_taken_for_the_end_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a look takes, the next ones find the flashes that came meanwhile."""
    looks = [False, True, *[False] * 9, True, *[False] * 10]
    waits: list[int] = []

    class Over(BaseException): ...

    def sees(timeout_ms: int) -> bool:
        waits.append(timeout_ms)
        return looks[len(waits) - 1]

    def end(status: int) -> None:
        raise Over

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Over):
        _end_in_the_dark(cast(Lookout, SimpleNamespace(sees=sees)))
    assert len(waits) == len(looks)
    assert sum(waits[-10:]) == ENGINE_LOST_AFTER_S * 1e3


def test_ray_options_without_ray_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks_per_node is given, but the executor is local"):
        EngineConfig(tp=2, ranks_per_node=1)
    with pytest.raises(ConfigError, match="executor is 'slurm'"):
        EngineConfig(executor="slurm")


@pytest.fixture
def with_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_missing_cluster_is_said_at_once(with_token: None, tiny_llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(ConfigError) as caught:
        LLM(tiny_llama, tp=2, progress=False, executor="ray", ray_address=address, node_wait_s=0.0)
    assert caught.value.code == "no_cluster"
    assert address in caught.value.found


def test_a_cluster_is_not_joined_without_a_token(
    with_token: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError) as caught:
        RayCluster("127.0.0.1:6379", 0.0)
    assert caught.value.code == "no_ray_token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError) as caught:
        RayCluster("127.0.0.1:6379", 0.0)
    assert caught.value.code == "ray_open"


def test_a_remote_client_is_no_node(with_token: None) -> None:
    with pytest.raises(ConfigError, match="ray://head:10001"):
        RayCluster("ray://head:10001", 0.0)


def test_without_ray_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as caught:
        RayCluster(None, 0.0)
    assert caught.value.code == "no_ray"
    assert "pip install 'phalanx[cluster] @ URL'" in caught.value.fix


def test_an_assignment_that_travels_holds_no_secret_key() -> None:
    """The seat adds its own; what goes through Ray has none."""
    sent = json.loads(msgspec.json.encode(Posting(assignment("/model"), dict(os.environ))))
    assert sent["assignment"]["keys"] is None
