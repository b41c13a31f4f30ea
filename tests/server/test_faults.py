"""Ranks that die or hang, clients that leave or do not read, and signals: what is promised happens."""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest

from phalanx.server.engine_client import SILENT_AFTER_S
from tests.server.running import Server, eventually, running

pytestmark = pytest.mark.slow

LONG = {"prompt": "abc", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def stream(server: Server, body: dict | None = None, events: list[str] | None = None) -> list[str]:
    """The events of a streamed completion, without `data: `; each is put into `events` as it comes."""
    events = [] if events is None else events
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=(body or LONG) | {"stream": True}, timeout=120
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
    return events


def streaming(
    server: Server, pool: ThreadPoolExecutor, count: int = 1, body: dict | None = None
) -> list[Future[list[str]]]:
    """Streams under way: each has sent something, so that an error comes as an event and not as a status."""
    seen: list[list[str]] = [[] for _ in range(count)]
    futures = [pool.submit(stream, server, body, events) for events in seen]
    assert eventually(lambda: all(seen) or any(future.done() for future in futures), within=60)
    return futures


def books_balance(server: Server) -> bool:
    body = server.health().json()
    return body["requests"] == 0 and body["kv_blocks"]["free"] == body["kv_blocks"]["total"]


@pytest.fixture(scope="module")
def lasting(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that the tests below do not end."""
    options = ("--tp", "2", "--max-num-seqs", "4", "--max-queued-requests", "2")
    with running(tiny_chat, tmp_path_factory.mktemp("lasting"), *options) as server:
        yield server


def test_a_killed_rank_ends_streams_with_an_error_and_the_process_with_its_cause(
    tiny_chat: Path, tmp_path: Path
) -> None:
    with running(tiny_chat, tmp_path, "--tp", "2") as server, ThreadPoolExecutor(4) as pool, server.braked():
        streams = streaming(server, pool, 4)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.rank(1).send_signal(signal.SIGKILL)
        for events in [future.result(60) for future in streams]:
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["error"]["type"] == "server_error"
        assert server.process.wait(60) == 1
        last = server.text.strip().splitlines()[-1]
        assert "rank_died" in last
        assert "Rank 1 was killed by signal 9" in last
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive


def test_an_engine_that_hangs_is_ended_and_the_rank_is_named(tiny_chat: Path, tmp_path: Path) -> None:
    with (
        running(tiny_chat, tmp_path, "--tp", "2", "--step-timeout", "7") as server,
        ThreadPoolExecutor(1) as pool,
        server.braked(),
    ):
        (events,) = streaming(server, pool)
        server.rank(1).send_signal(signal.SIGSTOP)
        assert "error" in json.loads(events.result(60)[-2])
        assert server.process.wait(60) == 1
        last = server.text[server.text.rindex("rank_stuck: ") :]
        assert re.match(r"rank_stuck: Rank 1 gave no sign of life .* Rank 1 is stopped: (step|idle) ", last)
        assert re.search(r"Stacks of rank 1:\n(.*\n)*.* in _serve", last)


def test_a_dead_engine_is_started_again_as_often_as_allowed(tiny_chat: Path, tmp_path: Path) -> None:
    """A request that waits behind the one that has tokens runs again; the one that had some hears of the death."""
    with (
        running(tiny_chat, tmp_path, "--restart", "1", "--tp", "2", "--max-num-seqs", "1") as server,
        ThreadPoolExecutor(2) as pool,
    ):
        ready = lambda: httpx.get(server.url + "/ready", timeout=60).status_code == 200  # noqa: E731
        with server.braked():
            (begun,) = streaming(server, pool)
            waiting = pool.submit(stream, server, LONG | {"max_tokens": 3})
            assert eventually(lambda: server.health().json()["requests"] == 2)
            server.rank(1).send_signal(signal.SIGKILL)
            assert eventually(lambda: not ready())
            refused = httpx.post(server.url + "/v1/completions", json=LONG, timeout=60)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert json.loads(begun.result(60)[-2])["error"]["code"] == "rank_died"
        assert json.loads(waiting.result(120)[-2])["choices"][0]["finish_reason"] == "length"
        assert eventually(ready)
        counted = httpx.get(server.url + "/metrics", timeout=60).text
        assert re.search(r"phalanx:engine_restarts_total\{.*\} 1\.0", counted)
        assert re.search(r"phalanx:requests_run_again_total\{.*\} 1\.0", counted)
        server.rank(1).send_signal(signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "killed by signal 9" in server.text.strip().splitlines()[-1]


def is_refused(server: Server) -> bool:
    """By an error, or, once the socket is closed, without an answer."""
    try:
        return httpx.post(server.url + "/v1/completions", json=LONG, timeout=60).status_code == 503
    except httpx.TransportError:
        return True


def test_what_outlasts_the_drain_timeout_is_ended_with_an_error(tiny_chat: Path, tmp_path: Path) -> None:
    with running(tiny_chat, tmp_path, "--drain-timeout", "0.2") as server, ThreadPoolExecutor(1) as pool:
        with server.braked():
            (events,) = streaming(server, pool)
            server.process.send_signal(signal.SIGTERM)
            assert json.loads(events.result(60)[-2])["error"]["code"] == "server_stopping"
        assert server.process.wait(60) == 0


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers put their temporary folders: a short path, for a socket's is limited."""
    with TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_a_server_told_to_stop_finishes_a_stream_takes_no_more_and_leaves_nothing(
    tiny_chat: Path, tmp_path: Path, temporary: Path
) -> None:
    with (
        running(tiny_chat, tmp_path, "--tp", "2", "--drain-timeout", "300") as server,
        ThreadPoolExecutor(1) as pool,
        server.client() as kept_open,
    ):
        assert kept_open.get("/ready").json() == {"status": "ready"}
        assert list(temporary.iterdir())
        (events,) = streaming(server, pool, body=LONG | {"max_tokens": 200})
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: "stopping" in server.text)
        assert is_refused(server)
        finished = events.result(300)
        assert json.loads(finished[-2])["choices"][0]["finish_reason"] == "length"
        assert finished[-1] == "[DONE]"
        assert server.process.wait(60) == 0
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    assert not list(temporary.iterdir())


def test_a_killed_api_process_takes_its_engine_with_it(tiny_chat: Path, tmp_path: Path, temporary: Path) -> None:
    with running(tiny_chat, tmp_path, "--tp", "2") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 2
        server.process.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    assert not list(temporary.iterdir())


def test_a_stopped_rank_shows_in_health_by_name_and_a_continued_one_finishes(lasting: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        rank = lasting.rank(1)
        with lasting.braked():
            (events,) = streaming(lasting, pool)
            rank.send_signal(signal.SIGSTOP)
        ready = lambda: httpx.get(lasting.url + "/ready", timeout=60)  # noqa: E731
        assert eventually(lambda: ready().status_code == 503 and "hang" in lasting.health().json())
        assert ready().json() == {"status": "stuck"}
        health = lasting.health()
        ranks = {each["rank"]: each for each in health.json()["ranks"]}
        assert (health.status_code, ranks[1]["stuck"], ranks[0]["stuck"]) == (503, True, False)
        hang = health.json()["hang"]
        assert (hang["code"], hang["ranks"]) == ("rank_stopped", [1])
        assert hang["found"] in lasting.text
        rank.send_signal(signal.SIGCONT)
        assert eventually(lambda: lasting.health().status_code == 200 and ready().status_code == 200)
        assert json.loads(events.result(120)[-2])["choices"][0]["finish_reason"] == "length"
        assert eventually(lambda: books_balance(lasting))


def test_a_stopped_api_process_goes_on_where_it_was(lasting: Server) -> None:
    """What the engine made meanwhile is sent, and the pause is not taken for the death of a rank."""
    with ThreadPoolExecutor(1) as pool:
        api = psutil.Process(lasting.process.pid)
        with lasting.braked():
            (events,) = streaming(lasting, pool)
            api.suspend()
        time.sleep(SILENT_AFTER_S + 1)
        api.resume()
        assert json.loads(events.result(120)[-2])["choices"][0]["finish_reason"] == "length"
        assert lasting.health().status_code == 200
    assert eventually(lambda: books_balance(lasting))


def test_a_stopped_engine_process_shows_in_health_and_live_still_answers(lasting: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        engine = lasting.engine()
        with lasting.braked():
            (events,) = streaming(lasting, pool)
            engine.suspend()
        assert eventually(lambda: lasting.health().status_code == 503)
        assert httpx.get(lasting.url + "/live", timeout=60).status_code == 200
        engine.resume()
        assert json.loads(events.result(120)[-2])["choices"][0]["finish_reason"] == "length"
    assert eventually(lambda: books_balance(lasting))


def test_connections_that_do_nothing_leave_room_for_others(tiny_chat: Path, tmp_path: Path) -> None:
    """With 256 file descriptors, 300 connections that have each sent a little."""
    begun = (b"", b"G", b"GET /live HTTP/1.1\r\ncontent-length: 10\r\n\r\n", b"GET /live HTTP/1.1\r\n\r\n\r\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(1024, hard)), hard))
    with running(tiny_chat, tmp_path, most_files=256) as server, ExitStack() as held:
        host, port = server.url.removeprefix("http://").split(":")
        for number in range(300):
            connection = held.enter_context(socket.create_connection((host, int(port)), timeout=60))
            with suppress(OSError):
                connection.sendall(begun[number % len(begun)])
        assert httpx.get(server.url + "/live", timeout=60).status_code == 200
        assert stream(server, LONG | {"max_tokens": 3})[-1] == "[DONE]"


def test_a_full_queue_answers_429_and_when_to_come_back(lasting: Server) -> None:
    """While the engine is stopped, what is asked for cannot end."""
    lasting.engine().suspend()
    with ThreadPoolExecutor(6) as pool:
        running_now = [pool.submit(stream, lasting, LONG | {"max_tokens": 3}) for _ in range(6)]
        assert eventually(lambda: lasting.health().json()["requests"] == 6)
        refused = httpx.post(lasting.url + "/v1/completions", json=LONG, timeout=60)
        lasting.engine().resume()
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert all(future.result(120)[-1] == "[DONE]" for future in running_now)
    assert eventually(lambda: books_balance(lasting))


@pytest.mark.parametrize("after_bytes", [0, 1, 2000], ids=["before the first token", "at once", "mid-stream"])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_blocks(lasting: Server, after_bytes: int, streamed: bool) -> None:
    """Its request takes 400 steps. The engine is stopped while it leaves, and told before it goes on."""
    host, port = lasting.url.removeprefix("http://").split(":")
    body = json.dumps(LONG | {"stream": streamed, "n": 2}).encode()
    logged, engine = len(lasting.text), lasting.engine()
    with lasting.braked(), socket.create_connection((host, int(port))) as connection:
        if not after_bytes:
            engine.suspend()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        assert eventually(lambda: lasting.health().json()["requests"] > 0)
        if streamed:
            read = 0
            while read < after_bytes:
                read += len(connection.recv(4096))
        engine.suspend()
        steps = steps_run(lasting)
    assert eventually(lambda: "client_gone" in lasting.text[logged:])
    engine.resume()
    assert eventually(lambda: books_balance(lasting))
    assert steps_run(lasting) - steps < 50


def steps_run(server: Server) -> int:
    found = re.search(r"phalanx:steps_total\{.*\} (\d+)", httpx.get(server.url + "/metrics", timeout=60).text)
    assert found is not None
    return int(found.group(1))


def test_half_a_body_and_then_nothing_leaves_nothing_behind(lasting: Server) -> None:
    host, port = lasting.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert lasting.health().status_code == 200
    assert eventually(lambda: books_balance(lasting))


@pytest.fixture(scope="module")
def impatient(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tiny_chat, tmp_path_factory.mktemp("impatient"), "--request-timeout", "2") as server:
        yield server


def test_a_client_that_does_not_read_is_cut_off_and_its_blocks_are_freed(impatient: Server) -> None:
    """Every event is made large (logprobs), so that the sockets fill up."""
    body = json.dumps(LONG | {"stream": True, "n": 16, "logprobs": 20, "max_tokens": 450}).encode()
    host, port = impatient.url.removeprefix("http://").split(":")
    logged = len(impatient.text)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        assert eventually(lambda: re.search("reason=(request_timeout|slow_reader)", impatient.text[logged:]))
        assert eventually(lambda: books_balance(impatient))
        assert impatient.health().status_code == 200


def test_a_request_that_takes_too_long_is_ended(impatient: Server) -> None:
    def ends_once_begun() -> bool:
        """A stream that does not get to its first token in time is answered as any other request."""
        with httpx.stream(
            "POST", impatient.url + "/v1/completions", json=LONG | {"stream": True}, timeout=60
        ) as answer:
            events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        if answer.status_code == 504:
            return False
        assert json.loads(events[-2])["error"]["code"] == "request_timeout"
        return True

    with impatient.braked():
        late = httpx.post(impatient.url + "/v1/completions", json=LONG, timeout=60)
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "request_timeout"
        assert eventually(ends_once_begun)
    assert eventually(lambda: books_balance(impatient))
    assert impatient.health().status_code == 200


def test_a_port_in_use_and_a_model_that_cannot_be_served_are_said_at_once(tiny_chat: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(AssertionError, match=f"cannot_listen: 127.0.0.1:{port}"),
            running(tiny_chat, tmp_path, "--port", str(port)),
        ):
            pass
    with pytest.raises(AssertionError, match=r"error .*config.json"), running(tmp_path, tmp_path):
        pass
