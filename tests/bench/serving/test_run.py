"""The whole way: from the command's flags, over a loopback server, to the table, the JSON and the picture."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner, Result

from phalanx import __version__
from phalanx.bench.serving import run as bench
from phalanx.bench.serving.options import Options
from phalanx.cli import app
from tests.bench.serving.conftest import DONE, FakeServer, Step, delta, frame, plain_answer, text, usage

SMALL = {"num_prompts": 6, "input_len": 8, "output_len": 4, "vocab_size": 100}


def command(server: FakeServer, *words: str, **flags: Any) -> Result:
    """`phalanx bench serve` with small requests unless told otherwise."""
    given = [word for flag, value in (SMALL | flags).items() for word in (f"--{flag.replace('_', '-')}", str(value))]
    return CliRunner().invoke(app, ["bench", "serve", "--url", server.url, *given, *words], env={"COLUMNS": "160"})


def test_a_run_is_told_in_a_table_and_in_vllms_keys(server: FakeServer, tmp_path: Path) -> None:
    server.answer = lambda body: [0.02, text("a"), 0.01, text("bc"), text("d", "length"), usage(8, 4, cached=2), DONE]
    file, picture = tmp_path / "result.json", tmp_path / "result.png"
    result = command(server, goodput="ttft:60000,tpot:60000", gpus=2, json=file, save_plot=picture)
    assert result.exit_code == 0, result.output
    for words in ("6 ok, 0 failed", "per GPU", "TTFT", "first chunk with text - sent", "12 prompt tokens (25.0%)"):
        assert words in result.output
    assert "(100% of those ok) with ttft <= 60000 ms, tpot <= 60000 ms" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")

    found = json.loads(file.read_text())
    expected = {
        "backend": "openai",
        "model_id": "fake-model",
        "tokenizer_id": "fake-model",
        "num_prompts": 6,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
        "completed": 6,
        "failed": 0,
        "total_input_tokens": 48,
        "total_output_tokens": 24,
        "cached_tokens": 12,
        "dataset": "random",
        "gpus": 2,
        "failures": {},
        "phalanx": __version__,
    }
    assert {key: found[key] for key in expected} == expected
    assert time.strptime(found["date"], "%Y%m%d-%H%M%S")
    per_second = 1 / found["duration"]
    assert found["request_throughput"] == found["request_goodput"] == pytest.approx(6 * per_second)
    assert found["output_throughput"] == pytest.approx(24 * per_second)
    assert found["total_token_throughput"] == pytest.approx(72 * per_second)
    assert found["output_throughput_per_gpu"] == pytest.approx(12 * per_second)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        keys = [f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p50", "p95", "p99")]
        assert all(found[key] >= 0 for key in keys)
        assert found[keys[1]] == found[keys[3]] <= found[keys[4]] <= found[keys[5]]
    assert found["mean_e2el_ms"] >= found["mean_ttft_ms"] >= 20
    assert found["mean_tpot_ms"] == pytest.approx((found["mean_e2el_ms"] - found["mean_ttft_ms"]) / 3)
    assert not any("client_queue_time" in key for key in found)


def test_what_is_sent(server: FakeServer) -> None:
    assert command(server, extra_body='{"top_k": 5, "temperature": 1}').exit_code == 0
    body = server.bodies[0]
    prompt = body.pop("prompt")
    assert len(prompt) == 8
    assert set(prompt) <= set(range(100))
    assert body == {
        "model": "fake-model",
        "max_tokens": 4,
        "temperature": 1,
        "top_k": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert set(server.paths) == {"/v1/completions"}
    assert "Authorization" not in server.headers[0]


def test_a_chat_is_sent_as_messages(server: FakeServer) -> None:
    server.answer = lambda body: [
        delta(role="assistant", content=""),
        0.03,
        delta(content="a"),
        delta("stop"),
        usage(9, 1),
        DONE,
    ]
    result = command(server, "--no-ignore-eos", "--model", "other", endpoint="chat", temperature=0.5)
    assert result.exit_code == 0, result.output
    body = server.bodies[0]
    assert set(server.paths) == {"/v1/chat/completions"}
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert (body["model"], body["temperature"]) == ("other", 0.5)
    assert not {"ignore_eos", "prompt"} & body.keys()


def test_a_role_chunk_on_accept_does_not_fake_the_first_token(server: FakeServer, tmp_path: Path) -> None:
    role, answer = delta(role="assistant", content=""), delta("stop", content="a")
    server.answer = lambda body: [role, 0.05, answer, usage(9, 1), DONE]
    file = tmp_path / "result.json"
    assert command(server, endpoint="chat", json=file).exit_code == 0
    found = json.loads(file.read_text())
    assert found["mean_ttft_ms"] >= 50
    assert found["mean_tpot_ms"] is None
    assert found["request_goodput"] is None


def test_a_key_is_sent_and_never_printed(server: FakeServer, tmp_path: Path) -> None:
    key, file = tmp_path / "key", tmp_path / "result.json"
    key.write_text("secret-1\n")
    result = command(server, api_key_file=key, json=file)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret-1"}
    assert "secret" not in result.output + file.read_text()


def test_failures_are_grouped_and_do_not_count(server: FakeServer, tmp_path: Path) -> None:
    """Of nine requests three get an HTTP error, two an error after the first token, one a cut stream."""
    refused = {"error": {"message": "too [many] requests", "code": 429}}
    bad: list[list[Step] | web.Response] = [
        *(web.json_response(refused, status=429) for _ in range(3)),
        [text("a"), frame(error={"message": "a rank died"})],
        [text("a"), frame(error={"message": "a rank died"})],
        [text("a"), usage(8, 1)],
    ]
    server.answer = lambda body: bad.pop() if bad else plain_answer(body)
    file = tmp_path / "result.json"
    result = command(server, num_prompts=9, json=file)
    assert result.exit_code == 0
    assert "3 ok, 6 failed" in result.output
    assert "too [many] requests" in result.output
    found = json.loads(file.read_text())
    assert found["failures"] == {
        "HTTP 429: too [many] requests": 3,
        "a rank died": 2,
        "the stream broke off before the answer was complete": 1,
    }
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (3, 6, 12)


def test_when_all_fail_the_exit_code_says_so(server: FakeServer) -> None:
    server.answer = lambda body: web.Response(status=500, text="")
    result = command(server, warmup=2)
    assert result.exit_code == 1
    assert "HTTP 500: Internal Server Error" in result.output
    assert "2 of 2 warm-up requests failed: HTTP 500" in result.output
    assert "Traceback" not in result.output


def test_a_request_that_takes_too_long_fails_alone(server: FakeServer) -> None:
    slow: list[list[Step]] = [[text("a"), 30.0]]
    server.answer = lambda body: slow.pop() if slow else plain_answer(body)
    result = command(server, timeout=3)
    assert "5 ok, 1 failed" in result.output
    assert "no complete answer within 3 s" in result.output


def test_a_connection_that_drops_is_a_failure(server: FakeServer) -> None:
    server.answer = lambda body: [text("a"), None]
    result = command(server)
    assert result.exit_code == 1
    assert "0 ok, 6 failed" in result.output
    assert "ClientPayloadError" in result.output


def test_answers_without_usage_are_counted_by_chunks_and_told(server: FakeServer) -> None:
    server.answer = lambda body: [text("a"), text("b"), text("c", "stop"), DONE]
    result = command(server)
    assert "48 in, 18 out" in result.output
    assert "6 answers came without usage" in result.output


def test_no_more_requests_are_in_flight_than_allowed(server: FakeServer) -> None:
    """The first are answered when as many as may be have come; then each stays for a while."""
    for most, limit in ((3, {"max_concurrency": 3}), (20, {})):
        server.answer = lambda body, most=most: [lambda: server.most_in_flight >= most, 0.02, *plain_answer(body)]
        assert command(server, num_prompts=20, **limit).exit_code == 0
        assert server.most_in_flight == most


def test_an_agent_waits_for_its_answer(server: FakeServer) -> None:
    """Two agents, so two in flight, and each sees its own requests in order."""
    server.answer = lambda body: [lambda: server.most_in_flight >= 2, 0.02, *plain_answer(body)]
    result = command(server, dataset="shared-prefix", prefix_len=16, agents=2, num_prompts=8)
    assert result.exit_code == 0, result.output
    assert server.most_in_flight == 2
    assert "192 in" in result.output


def test_warm_up_comes_first_and_is_not_counted(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command(server, warmup=3, json=file)
    assert len(server.bodies) == 9
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 9
    assert json.loads(file.read_text())["total_input_tokens"] == 48
    alone = len(server.bodies)
    command(server)
    assert sorted(tuple(body["prompt"]) for body in server.bodies[alone:]) == sorted(prompts[3:])


def test_requests_come_at_the_rate_asked_for(server: FakeServer, tmp_path: Path) -> None:
    """11 requests at 50 a second: the last is due after 0.2 s. A slot is free only after 0.03 s, so they queue."""
    file = tmp_path / "result.json"
    server.answer = lambda body: [0.03, *plain_answer(body)]
    flags = {"num_prompts": 11, "request_rate": 50, "arrival": "constant", "json": file}
    result = command(server, max_concurrency=1, **flags)
    assert "50 req/s (constant), at most 1 at a time" in result.output
    found = json.loads(file.read_text())
    assert found["duration"] >= 11 * 0.03
    assert (found["request_rate"], found["burstiness"]) == (50, "inf")
    assert found["p50_e2el_ms"] >= 30
    assert found["p99_client_queue_time_ms"] >= 0.8 * (10 * 30 - 200)
    assert found["max_client_delay_ms"] >= 0
    command(server, **flags)
    assert json.loads(file.read_text())["duration"] >= 0.2 + 0.03


def test_percentiles_are_named_in_table_and_keys(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = command(server, percentiles="90,99.9", json=file)
    assert "p99.9" in result.output
    found = json.loads(file.read_text())
    assert {"p90_ttft_ms", "p99.9_ttft_ms"} <= found.keys()
    assert "p95_ttft_ms" not in found


def test_the_server_is_asked_for_its_vocabulary(server: FakeServer) -> None:
    server.tokenize = lambda text: [1, 39, 2] if "quokka" in text else []
    bench.run(Options(url=server.url, num_prompts=5, input_len=200, output_len=2))
    assert {token for body in server.bodies for token in body["prompt"]} == set(range(40))


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    result = CliRunner().invoke(app, ["bench", "serve", "--url", url])
    assert result.exit_code == 1
    assert f"server_unreachable: {url} does not answer" in result.output
    assert "name its address with --url" in result.output
    assert "Traceback" not in result.output


def test_a_server_that_wants_a_key(server: FakeServer) -> None:
    server.models, server.models_status = {"error": {"message": "no key"}}, 401
    result = command(server)
    assert result.exit_code == 1
    assert "answers HTTP 401: no key" in result.output
    assert "--api-key-file" in result.output


@pytest.mark.parametrize(("models", "status"), [({"data": []}, 200), ("what?", 200), ({}, 404)])
def test_a_server_that_names_no_model_must_be_told(server: FakeServer, models: Any, status: int) -> None:
    server.models, server.models_status = models, status
    assert "Name it with --model" in command(server).output
    assert command(server, model="mine").exit_code == 0
    assert server.bodies[0]["model"] == "mine"


def test_the_room_is_that_of_the_model_asked_for(server: FakeServer) -> None:
    server.models = {"data": [{"id": "small", "max_model_len": 11}, {"id": "large", "max_model_len": 12}]}
    assert "exceed the server's max_model_len 11" in command(server).output
    assert command(server, model="large").exit_code == 0


def test_ctrl_c_ends_with_the_results_so_far(server: FakeServer, tmp_path: Path) -> None:
    """Three are answered, and only then the next three sent, which would take a minute."""
    file = tmp_path / "result.json"
    quick = [plain_answer({"prompt": [1] * 8, "max_tokens": 4}) for _ in range(3)]
    server.answer = lambda body: quick.pop() if quick else [text("a"), 60.0]
    flags = SMALL | {"max_concurrency": 3}
    words = [word for flag, value in flags.items() for word in (f"--{flag.replace('_', '-')}", str(value))]
    script = [sys.executable, "-m", "phalanx.cli", "bench", "serve", "--url", server.url, "--json", str(file), *words]
    process = subprocess.Popen(
        script,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )
    deadline = time.monotonic() + 120
    while server.in_flight != 3 or len(server.bodies) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "Interrupted: 3 of 6 requests were finished and count." in " ".join(output.split())
    assert json.loads(file.read_text())["completed"] == 3


def test_the_bar_is_only_for_terminals(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = lambda body: [0.1, *plain_answer(body)]
    shown = {}
    for terminal in (False, True):
        out = io.StringIO()
        monkeypatch.setattr(
            bench, "Console", lambda out=out, on=terminal, **given: Console(file=out, force_terminal=on, width=120)
        )
        bench.run(Options(url=server.url, **SMALL))
        shown[terminal] = out.getvalue()
    assert "tok/s" in shown[True].partition("6 ok")[0]
    assert "0 failed" in shown[True].partition("6 ok")[0]
    assert shown[False].startswith("fake-model at")
    assert "\x1b" not in shown[False]


def test_torch_is_not_imported(server: FakeServer) -> None:
    words = ["bench", "serve", "--url", server.url, "--num-prompts", "1", "--input-len", "4", "--output-len", "2"]
    script = (
        "import sys\nfrom phalanx.cli import app\nassert 'aiohttp' not in sys.modules\n"
        f"app({words}, standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
