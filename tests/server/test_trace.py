"""`POST /trace` on a running server, and `phalanx trace --url`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.trace.perfetto import records_of
from phalanx.trace.timeline import effects_before_causes, steps_of
from tests.server.running import Server, eventually
from tests.server.test_faults import books_balance

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

LONG = {"prompt": "abc", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


@contextmanager
def load(server: Server) -> Iterator[None]:
    """A stream of tokens, from the first one to the end of the block."""
    over, began = threading.Event(), threading.Event()

    def ask() -> None:
        while not over.is_set():
            with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=60) as answer:
                for _ in answer.iter_lines():
                    began.set()
                    if over.is_set():
                        return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert began.wait(60)
        yield
    finally:
        over.set()
        thread.join()


def test_steps_of_a_server_under_load(server: Server, tmp_path: Path) -> None:
    with load(server):
        answer = httpx.post(server.url + "/trace", json={"steps": 4, "seconds": 60}, timeout=90)
        saved = tmp_path / "trace.json"
        told = CliRunner().invoke(app, ["trace", "--url", server.url, "--steps", "3", "--output", str(saved)])
        judged = CliRunner().invoke(app, ["doctor", "--live", server.url, "--json"])
    assert answer.status_code == 200, answer.text
    traces = records_of(answer.content)
    steps = steps_of(traces)
    assert len(steps) == 4
    assert len(traces.ranks) == 2
    assert not list(effects_before_causes(steps))
    assert {event["ph"] for event in answer.json()["traceEvents"]} >= {"X", "C", "M"}
    assert told.exit_code == 0, told.output
    assert "steps on 2 ranks" in told.output
    assert judged.exit_code == 0, judged.output
    picture = json.loads(judged.output)["picture"]
    assert picture["ranks"] == 2
    assert picture["exchanged"] > 0
    assert len(steps_of(records_of(saved.read_bytes()))) == 3


def test_an_idle_server_tells_none_and_takes_one_trace_at_a_time(server: Server) -> None:
    """One that waits for a step runs until there is one."""

    def trace(**body: float) -> httpx.Response:
        return httpx.post(server.url + "/trace", json=body, timeout=90)

    assert eventually(lambda: books_balance(server))
    answers = [trace(seconds=0.1)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trace, steps=1, seconds=60)
        while not waiting.done() and answers[-1].status_code != 409:
            answers.append(trace(seconds=0.1))
        httpx.post(server.url + "/v1/completions", json=LONG | {"max_tokens": 4, "stream": False})
        last = waiting.result()
    refused = [answer for answer in (*answers, last) if answer.status_code == 409]
    assert {answer.json()["error"]["code"] for answer in refused} == {"trace_runs"}
    for answer in answers:
        assert answer.status_code == 409 or steps_of(records_of(answer.content)) == []
    assert last.status_code == 409 or len(steps_of(records_of(last.content))) == 1


@pytest.mark.parametrize("body", [{"steps": 0}, {"steps": 65}, {"seconds": 61}, {"layers": 1}, []])
def test_a_trace_has_bounds(server: Server, body: object) -> None:
    assert httpx.post(server.url + "/trace", json=body).status_code == 400
