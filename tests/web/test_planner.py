"""The planner over HTTP: the command line's own answers, nothing of the server's disk, bounds on what may be asked."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from phalanx.models import catalog
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.record import to_dict
from phalanx.server.errors import ApiError
from phalanx.spec.machine import gpus
from phalanx.web import planner
from phalanx.web.planner_lane import PlannerLane
from phalanx.web.studio import create_studio

QUESTION = {"model": "Llama-3.3-70B", "machine": "4xH100-SXM", "engines": "vllm", "tps": "2,4"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_studio()) as client:
        yield client


def asked(client: TestClient, path: str = "plan", **more: Any) -> httpx.Response:
    return client.post(f"/cockpit/{path}", json=QUESTION | more)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"machine": "2xRTX4090+1xRTX3090", "model": "SmolLM2-135M", "engines": "phalanx", "tps": "1,3"},
        {"model": "DeepSeek-V3", "engines": ""},
        {"slo": "ttft:10,tpot:1", "kv_format": "fp8", "formats": "fp8", "concurrency": 128, "input_tokens": 4000},
    ],
)
def test_a_plan_is_that_of_the_command_line(client: TestClient, more: dict[str, Any]) -> None:
    answer = asked(client, **more)
    assert answer.status_code == 200
    assert answer.json() == json.loads(json.dumps(to_dict(ask(PlanQuestion(**QUESTION | more)))))


def test_the_catalog_is_complete(client: TestClient) -> None:
    told = client.get("/cockpit/catalog").json()
    assert [model["name"] for model in told["models"]] == list(catalog.entries())
    assert [gpu["name"] for gpu in told["gpus"]] == [gpu.name for gpu in gpus()]
    assert [engine["name"] for engine in told["engines"]] == ["phalanx", "vllm", "sglang", "trtllm"]
    for machine in told["machines"]:
        assert client.post("/cockpit/fits", json={"machine": machine}).status_code == 200


@pytest.mark.parametrize("name", ["folder", "folder/config.json"])
def test_a_model_on_the_servers_disk_is_not_looked_at(client: TestClient, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text(json.dumps(dict(catalog.entries()["Qwen3-8B"].config)))
    refused = asked(client, model=str(tmp_path / name))
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unknown_model"
    missing = asked(client, model=str(tmp_path / "no" / name))
    assert missing.json()["error"]["code"] == "unknown_model", "one cannot tell what is there from what is not"


def test_a_model_elsewhere_is_not_fetched(client: TestClient) -> None:
    error = asked(client, model="someone/some-model").json()["error"]
    assert error["code"] == "unknown_model"
    assert "phalanx plan" in error["fix"]


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"model": "Lama-3.3-70"}, "model", "Llama-3.3-70B"),
        ({"machine": "4xH100-SX"}, "machine", "H100-SXM"),
        ({"machine": "65xH100-SXM"}, "machine", "64"),
        ({"machine": "x"}, "machine", "No GPU"),
        ({"concurrency": 5000}, "concurrency", "4096"),
        ({"concurrency": 0}, "concurrency", "1"),
        ({"input_tokens": 2_000_000}, "input_tokens", "1000000"),
        ({"output_tokens": "many"}, "output_tokens", "integer"),
        ({"trace": "/etc/passwd"}, "trace", "not permitted"),
        ({"spread": 1.0}, "spread", "less than 1"),
        ({"years": 0}, "years", "greater than 0"),
        ({"model": "x" * 201}, "model", "200"),
        ({"slo": "speed:3"}, None, "ttft"),
        ({"engines": "vlm"}, None, "vllm"),
        ({"formats": "fp9"}, None, "fp8"),
        ({"kv_format": "fp7"}, None, "fp8"),
        ({"tps": "5"}, None, "4 GPUs"),
    ],
)
def test_what_is_wrong_is_told_with_the_field_it_is_about(
    client: TestClient, more: dict[str, Any], param: str | None, words: str
) -> None:
    answer = asked(client, **more)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param
    assert words in error["message"]


def test_an_error_has_its_code_what_was_found_and_what_to_do(client: TestClient) -> None:
    error = asked(client, machine="4xH100-SX").json()["error"]
    assert error["code"] == "unknown_gpu"
    assert error["message"] == f"{error['found']} {error['fix']}"


def test_on_the_front_no_other_point_is_faster_both_ways(client: TestClient) -> None:
    points = asked(client, "pareto", formats="fp8", tps="1,2,4").json()["points"]
    assert {point["tp"] for point in points} == {1, 2, 4}
    for point in points:
        beaten = any(
            other["tokens_per_s_per_user"] > point["tokens_per_s_per_user"]
            and other["tokens_per_s_per_gpu"] > point["tokens_per_s_per_gpu"]
            for other in points
        )
        assert point["on_front"] is not beaten
    plan = asked(client, formats="fp8", tps="4").json()["best"]
    (same,) = [point for point in points if point["tp"] == 4 and point["concurrency"] == 32]
    assert same["tokens_per_s_per_gpu"] == plan["tokens_per_s_per_gpu"]
    assert same["tokens_per_s_per_user"] == pytest.approx(1000 / plan["tpot_ms"]["mid"])


def test_what_fits_is_what_a_plan_says_fits(client: TestClient) -> None:
    found = client.post("/cockpit/fits", json={"machine": "4xL40S", "engines": "vllm", "context": 1280}).json()
    assert [row["model"] for row in found["models"]] == list(catalog.entries())
    for row in found["models"]:
        assert bool(row["ways"]) is (row["why_not"] is None)
    rows = {row["model"]: row for row in found["models"]}
    for model in ("Qwen3-32B", "Llama-3.3-70B", "gpt-oss-120b", "DeepSeek-V3"):
        for number_format in ("bf16", "fp8"):
            load = PlanQuestion(model, "4xL40S", concurrency=1, engines="vllm", formats=number_format)
            degrees = [candidate.tp for candidate in ask(load).candidates if candidate.stages == 1]
            ways = [way for way in rows[model]["ways"] if way["format"] == number_format]
            if number_format in (catalog.model(model).number_format, "fp8") and degrees and ways:
                assert ways[0]["tp"] == min(degrees)
            elif number_format == catalog.model(model).number_format:
                assert not ways
                assert not degrees
    assert "GiB short" in rows["Llama-3.1-405B"]["why_not"]


class _SlowLane(PlannerLane):
    """Answers when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.answered: list[str] = []

    def ask(self, kind: str, question: dict[str, Any]) -> bytes:
        assert self.go.wait(30), "nobody else came to act meanwhile: the server was held up"
        self.answered.append(question["who"])
        return b"{}"


def _asker(gone: bool) -> Any:
    async def is_disconnected() -> bool:
        return gone

    return SimpleNamespace(is_disconnected=is_disconnected, scope={})


def test_a_plan_holds_up_nobody_only_so_many_wait_and_those_who_left_are_not_answered() -> None:
    async def crowd() -> tuple[list[str], list[int]]:
        lane = _SlowLane()
        desk = planner._Desk(lane)
        waiting = [
            asyncio.create_task(desk.answer("plan", {"who": str(number)}, _asker(gone=number % 2 == 1)))
            for number in range(16)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await desk.answer("plan", {"who": "late"}, _asker(gone=False))
        assert refused.value.status_code == 429
        lane.go.set()
        answers = [answer.status_code for answer in await asyncio.gather(*waiting)]
        assert (await desk.answer("plan", {"who": "later"}, _asker(gone=False))).status_code == 200
        return lane.answered, answers

    with ThreadPoolExecutor(1) as apart:  # the browser's driver has a loop in this thread
        answered, statuses = apart.submit(asyncio.run, crowd()).result()
    assert answered == ["0", "2", "4", "6", "8", "10", "12", "14", "later"]
    assert statuses == [200, 499] * 8


@pytest.fixture
def lane() -> Iterator[PlannerLane]:
    lane = PlannerLane()
    yield lane
    lane.close()


def test_a_planner_that_dies_is_replaced(lane: PlannerLane) -> None:
    assert lane.ask("catalog", {})
    assert lane._process is not None
    lane._process.kill()
    lane._process.wait()
    assert lane.ask("catalog", {})


def test_a_question_that_takes_too_long_is_given_up(lane: PlannerLane) -> None:
    assert lane.ask("catalog", {})
    lane._time_limit_s = 0.01
    heavy = QUESTION | {"concurrency": 4096, "input_tokens": 8000, "output_tokens": 8000, "engines": "vllm"}
    with pytest.raises(ApiError) as given_up:
        lane.ask("plan", heavy)
    assert given_up.value.status_code == 503
    lane._time_limit_s = 60
    assert lane.ask("catalog", {})


def test_the_planner_ends_with_its_server() -> None:
    """Its input ends when the server does, however that comes."""
    code = (
        "import os; from phalanx.web.planner_lane import PlannerLane; lane = PlannerLane(); lane.ask('catalog', {});"
        "print(lane._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -9
    status = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(600):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        threading.Event().wait(0.1)
    pytest.fail("the planner is still there")


@pytest.mark.parametrize(
    "code",
    [
        "from phalanx.web.studio import create_studio; create_studio(); import phalanx.cli",
        "from phalanx.web.planner_worker import answer; "
        'assert b"error" not in answer(b\'{"kind": "plan", "question": {"model": "Qwen3-8B", "machine": "1xL4"}}\')',
    ],
)
def test_the_studio_needs_neither_torch_nor_the_servers_libraries(code: str) -> None:
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'zmq', 'uvloop', 'transformers', 'numpy', 'tokenizers',\n"
        "                                      'huggingface_hub', 'prometheus_client', 'xgrammar', 'ray'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    done = subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
