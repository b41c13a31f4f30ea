"""A running server as facts, asked over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from phalanx.doctor.running import ServerError, _get, parse_metrics, read_server

PAGE = """# HELP phalanx:num_requests_running Requests in the batch.
phalanx:num_requests_running{{model_name="m",engine="0"}} {running}
phalanx:generation_tokens_total{{model_name="m",engine="0"}} {tokens}
phalanx:inter_token_latency_seconds_bucket{{le="0.01",model_name="m",engine="0"}} 990.0
phalanx:inter_token_latency_seconds_sum{{model_name="m",engine="0"}} {gap_seconds}
phalanx:inter_token_latency_seconds_count{{model_name="m",engine="0"}} {gaps}
phalanx:time_to_first_token_seconds_sum{{model_name="m",engine="0"}} 4.0
phalanx:time_to_first_token_seconds_count{{model_name="m",engine="0"}} 8.0
"""
BEFORE = PAGE.format(running=10.0, tokens=1000.0, gap_seconds=10.0, gaps=1000.0)
AFTER = PAGE.format(running=20.0, tokens=1500.0, gap_seconds=20.0, gaps=1500.0)


@contextmanager
def server(pages: dict[str, list[str]], key: str | None = None, health: int = 200) -> Iterator[str]:
    """Answers each path with its pages in turn, the last one for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told = pages.get(self.path)
            refused = key is not None and self.headers.get("authorization") != f"Bearer {key}"
            status = 401 if refused else 404 if told is None else health if self.path == "/health" else 200
            body = b"{}" if told is None or refused else (told.pop(0) if len(told) > 1 else told[0]).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


MODELS = json.dumps({"data": [{"id": "Llama-3.3-70B"}]})
RANKS = json.dumps({"status": "stuck", "ranks": [{"rank": rank} for rank in range(4)]})


def test_rates_are_of_the_time_between_two_looks() -> None:
    with server({"/v1/models": [MODELS], "/metrics": [BEFORE, AFTER], "/health": [RANKS]}, health=503) as url:
        found = read_server(url + "/", seconds=0.5)
    assert (found.model, found.tp, found.concurrency) == ("Llama-3.3-70B", 4, 15.0)
    assert found.tpot_ms == pytest.approx(20.0)
    assert found.ttft_ms == pytest.approx(500.0)
    assert 0 < found.tokens_per_s <= 1000
    assert found.deaths == ("rank_stuck",)


def test_vllm_is_understood_and_its_tp_is_what_was_said() -> None:
    pages = {"/v1/models": [MODELS], "/metrics": [BEFORE.replace("phalanx:", "vllm:")]}
    with server(pages) as url:
        found = read_server(url, seconds=0, tp=2)
    assert (found.tp, found.deaths) == (2, ())
    assert found.tpot_ms == pytest.approx(10.0)


def test_a_key_is_sent_where_it_is_asked_for() -> None:
    pages = {"/v1/models": [MODELS], "/metrics": [BEFORE]}
    with server(pages, key="secret") as url:
        assert read_server(url, seconds=0, key="secret").model == "Llama-3.3-70B"
        with pytest.raises(ServerError, match="401"):
            read_server(url, seconds=0)


@pytest.mark.parametrize(
    ("pages", "code"),
    [
        ({}, "server_refused"),
        ({"/v1/models": ["<html>"]}, "bad_answer"),
        ({"/v1/models": ["[]"]}, "no_model"),
        ({"/v1/models": [MODELS], "/metrics": ["go_gc_duration_seconds 1"]}, "no_metrics"),
    ],
)
def test_what_is_no_such_server_is_refused(pages: dict[str, list[str]], code: str) -> None:
    with server(pages) as url, pytest.raises(ServerError) as error:
        read_server(url, seconds=0)
    assert error.value.code == code


def test_addresses_that_lead_nowhere() -> None:
    with server({}) as url:
        pass
    for address, code in ((url, "no_server"), ("file:///etc/passwd", "bad_url")):
        with pytest.raises(ServerError) as error:
            read_server(address, seconds=0)
        assert error.value.code == code


def test_samples_are_summed_over_labels_and_oddities_are_left_out() -> None:
    samples = ('a{x="1"} 1', 'a{x="2"} 2', "b NaN", 'd_bucket{le="1"} 4', "e nonsense")
    text = "\n".join(f"phalanx:{sample}" for sample in samples) + "\nother:c 3\n"
    assert parse_metrics(text) == {"a": 3.0}


def test_a_server_that_says_why_it_refuses_is_quoted() -> None:
    starting = json.dumps({"error": {"message": "The server is starting.", "code": "server_starting"}})
    with server({"/health": [starting], "/metrics": [BEFORE]}, health=503) as url:
        with pytest.raises(ServerError, match=r"answered 503\. The server is starting\.") as caught:
            _get(f"{url}/health", None)
        assert "/ready" in caught.value.fix
        with pytest.raises(ServerError, match=r"answered 404\.( Check|$)"):
            _get(f"{url}/trace", None)
