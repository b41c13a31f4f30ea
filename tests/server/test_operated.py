"""A server as an operator runs it: keys in a file, a port for probes, JSON in the log, traces, SIGHUP."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.running import Server, eventually, running

pytestmark = pytest.mark.slow

ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in ("secret-a", "secret-b"))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@dataclass
class Operated:
    server: Server
    keys: Path
    spans: list = field(default_factory=list)

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.server.text.splitlines()]

    def accesses(self, id: str) -> list[dict]:
        return [record for record in self.records if record.get("id") == id]

    @property
    def admin(self) -> str:
        return re.search(r"without a key: (\S+)/", self.server.text)[1]  # type: ignore[index]

    def ask(self, headers: dict[str, str], path: str = "/v1/completions") -> httpx.Response:
        body = {"prompt": "a", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        return httpx.post(self.server.url + path, json=body, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def operated(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operated")
    keys = folder / "keys"
    keys.write_text("secret-a name=alice rpm=3\nsecret-b name=bob admin\n")
    spans: list = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(span for of in sent.resource_spans for scope in of.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, args=(0.01,), daemon=True).start()
    traces = ("--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces")
    options = ("--api-key-file", str(keys), "--admin-port", "0", "--log-format", "json", *traces)
    with running(tiny_chat, folder, "--served-model-name", "tiny", *options) as server:
        yield Operated(server, keys, spans)
    collector.shutdown()


def test_probes_and_metrics_need_no_key_on_their_own_port_alone(operated: Operated) -> None:
    with httpx.Client(headers={"host": "pod.example:80"}) as client:
        for path in ("/live", "/ready", "/health", "/metrics", "/version"):
            assert client.get(operated.admin + path).status_code == 200, path
        for path in ("/v1/models", "/", "/docs", "/openapi.json", "/cockpit/about", "/server_info"):
            assert client.get(operated.admin + path).status_code in (404, 421), path
        assert client.get(operated.server.url + "/metrics").status_code == 401


def test_every_line_is_json_and_each_request_has_one(operated: Operated) -> None:
    assert operated.ask(BOB | {"x-request-id": "mine"}).status_code == 200
    assert operated.ask(BOB | {"x-request-id": "lost"}, "/v1/no%0Awhere").status_code == 404
    assert operated.ask({"x-request-id": "stranger"}).status_code == 401
    assert eventually(lambda: operated.accesses("stranger"))
    (mine,), (lost,), (stranger,) = (operated.accesses(id) for id in ("mine", "lost", "stranger"))
    assert mine["logger"] == "phalanx.request"
    assert (mine["key"], mine["status"], mine["prompt"], mine["output"]) == ("bob", 200, 1, 3)
    assert mine["reason"] == "length"
    assert 0 < mine["ttft_ms"] <= mine["ms"]
    assert (lost["status"], lost["path"], lost["reason"]) == (404, "/v1/no?where", "not_found")
    assert (stranger["status"], stranger["reason"]) == (401, "invalid_api_key")
    assert "key" not in stranger
    assert not any(record.get("path") == "/metrics" and record["status"] == 200 for record in operated.records)


def test_a_request_is_a_span_of_its_client_s_trace_under_vllm_s_names(operated: Operated) -> None:
    parent = f"00-{TRACE}-00f067aa0ba902b7-01"
    assert operated.ask(BOB | {"x-request-id": "traced", "traceparent": parent}).status_code == 200
    assert eventually(lambda: any(span.trace_id.hex() == TRACE for span in operated.spans))
    (span,) = [span for span in operated.spans if span.trace_id.hex() == TRACE]
    told = {each.key: each.value for each in span.attributes}
    assert span.name == "llm_request"
    assert span.parent_span_id.hex() == "00f067aa0ba902b7"
    assert told["gen_ai.request.id"].string_value == "traced"
    assert told["gen_ai.usage.prompt_tokens"].int_value == 1
    assert told["gen_ai.usage.completion_tokens"].int_value == 3
    first, whole = (told[f"gen_ai.latency.{name}"].double_value for name in ("time_to_first_token", "e2e"))
    assert 0 < first <= whole
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(whole * 1e9, rel=0.01)


def test_what_concerns_all_keys_takes_one_that_may(operated: Operated) -> None:
    assert operated.ask(ALICE, "/reset_prefix_cache").json()["error"]["code"] == "not_an_operator"
    assert operated.ask(BOB, "/reset_prefix_cache").status_code == 200


def test_quotas_are_by_key_and_keys_are_read_anew_at_sighup(operated: Operated) -> None:
    codes = [operated.ask(ALICE).status_code for _ in range(4)]
    assert codes[:3] == [200] * 3
    refused = operated.ask(ALICE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert operated.ask(BOB).status_code == 200
    operated.keys.write_text("secret-b name=bob\nsecret-c nonsense\n")
    os.kill(operated.server.process.pid, signal.SIGHUP)
    assert eventually(lambda: "the keys stay as they were" in operated.server.text)
    assert operated.ask(BOB).status_code == 200
    operated.keys.write_text("secret-a\nsecret-c\n")
    os.kill(operated.server.process.pid, signal.SIGHUP)
    assert eventually(lambda: "read the keys anew: there are 2" in operated.server.text)
    assert operated.ask(ALICE).status_code == 200
    assert operated.ask(BOB).status_code == 401
