"""The wall clock may jump: nothing ends early, expires or hangs by it."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import httpx
import pytest

import phalanx
from tests.server.running import running

JUMPS = """
import random, time
_real, _years = time.time, random.Random(1)
def jumping():
    return _real() + _years.uniform(-10, 10) * 365 * 86400
time.time = jumping
"""
WRITES_A_DATE = {
    "bench/emulate.py",
    "bench/lab/files.py",
    "bench/serving/report.py",
    "bench/offline.py",
    "doctor/gather/__init__.py",
    "doctor/preflight.py",
    "plan/held_out.py",
    "plan/own_profile.py",
    "server/app.py",
    "server/service.py",
    "server/traces.py",
    "web/sampler.py",
}
"""Files that ask what time it is, to tell it to someone. Nothing is decided by it."""


def asks_the_wall_clock(source: str) -> bool:
    """By any way that Python has but `sleep`, `monotonic` and the counters."""
    if not re.search(r"\btime\.|\bdatetime\b|\bdate\b|from time import", source):
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time" and {alias.name for alias in node.names} & WALL:
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            whose = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (whose, node.attr) in ASKED or (whose == "time" and node.attr in WALL):
                return True
    return False


WALL = {"time", "time_ns", "localtime", "gmtime", "clock_gettime", "CLOCK_REALTIME"}
ASKED = {("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}


def test_the_wall_clock_is_only_asked_to_be_told() -> None:
    root = Path(phalanx.__file__).parent
    asking = {str(path.relative_to(root)) for path in root.rglob("*.py") if asks_the_wall_clock(path.read_text())}
    assert asking == WRITES_A_DATE


@pytest.mark.slow
def test_a_server_whose_clock_jumps_by_years_serves_as_ever(
    tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every look at it, in the API process, the engine, the ranks and those that read requests."""
    (tmp_path / "sitecustomize.py").write_text(JUMPS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    body = {"prompt": "abc", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with running(tiny_chat, tmp_path, "--step-timeout", "60", "--request-timeout", "60") as server:
        with server.client() as client:
            answers = [client.post("/v1/completions", json=body).json() for _ in range(2)]
            assert [answer["usage"]["completion_tokens"] for answer in answers] == [40, 40]
            assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
            assert abs(answers[0]["created"] - answers[1]["created"]) > 86400, "the clock does jump"
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
                events = [line for line in stream.iter_lines() if line.startswith("data: {")]
            assert json.loads(events[-1][6:])["choices"][0]["finish_reason"] == "length"
            schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
            asked = body | {"max_tokens": 200, "structured_outputs": {"json": schema}, "ignore_eos": False}
            assert set(json.loads(client.post("/v1/completions", json=asked).json()["choices"][0]["text"])) == {"a"}
        assert server.health().status_code == 200
        assert httpx.get(server.url + "/metrics", timeout=60).status_code == 200
        assert server.stop() == 0
