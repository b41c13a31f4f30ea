"""Keys, bounds and defaults."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.types import Message, Receive, Scope, Send

from phalanx.errors import ConfigError
from phalanx.runtime.config import EngineConfig
from phalanx.server import guard
from phalanx.server import keys as keyring
from phalanx.server.errors import ApiError
from phalanx.server.guard import Guard
from phalanx.server.keys import KeyRing
from phalanx.server.options import ServeOptions
from phalanx.server.serve import serve
from tests import timeless
from tests.server.conftest import make_certificate
from tests.server.running import Server, running

pytestmark = pytest.mark.xdist_group("server")

ROUTES = [
    "/ready",
    "/health",
    "/metrics",
    "/version",
    "/v1/models",
    "/v1/models/tiny",
    "/v1/responses/resp_1",
    "/openapi.json",
    "/nothing",
    "/cockpit/about",
    "/cockpit/nothing",
]
OPEN = ["/live", "/docs", "/", "/cockpit.js", "/cockpit.css"]
"""None of these tells anything about the server."""
POSTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/reset_prefix_cache",
]


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def status_of(keys: list[str], path: str, *headers: tuple[bytes, bytes]) -> int:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    host = (b"host", b"localhost:8000")
    scope = {"type": "http", "path": path, "method": "GET", "headers": [host, *headers], "server": ("10.1.2.3", 8000)}
    await Guard(hello, KeyRing(keys), max_body=1000)(scope, receive, send)
    return sent[0]["status"]


@pytest.mark.parametrize(
    ("path", "authorization", "status"),
    [
        ("/live", None, 200),
        ("/v1/models", None, 401),
        ("/v1/models", b"Bearer one", 200),
        ("/v1/models", b"bearer two", 200),
        ("/v1/models", b"Bearer one two", 401),
        ("/v1/models", b"Bearer on", 401),
        ("/v1/models", b"Bearer onee", 401),
        ("/v1/models", b"Bearer ", 401),
        ("/v1/models", b"Basic one", 401),
        ("/v1/models", b"one", 401),
        ("/live/", None, 401),
        ("//live", None, 401),
        ("/LIVE", None, 401),
        ("/v1/../live", None, 401),
    ],
)
def test_a_key_opens_everything_and_without_one_only_live_is_open(
    path: str, authorization: bytes | None, status: int
) -> None:
    headers = [(b"authorization", authorization)] if authorization is not None else []
    assert asyncio.run(status_of(["one", "two"], path, *headers)) == status
    assert asyncio.run(status_of([], path, *headers)) == 200


def test_every_key_is_compared_by_digest_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match does not end the comparing, so the time does not tell which key it was."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(keyring, "compare_digest", compare)
    assert asyncio.run(status_of(["one", "two", "three"], "/x", (b"authorization", b"Bearer one"))) == 200
    assert len(compared) == 3
    assert all(len(left) == len(right) == 32 for left, right in compared)


async def status_for_host(*hosts: bytes, path: str = "/v1/models", keys: tuple[str, ...] = ()) -> int:
    statuses: list[int] = []

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [*((b"host", host) for host in hosts), (b"authorization", b"Bearer one")]
    scope = {"type": "http", "path": path, "method": "GET", "headers": headers, "server": ("10.1.2.3", 8000)}
    await Guard(hello, KeyRing(keys), max_body=1000, hosts=["Model.Example"])(scope, receive, send)
    return statuses[0]


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        ([b"localhost"], 200),
        ([b"LOCALHOST:8000"], 200),
        ([b"localhost."], 200),
        ([b"127.0.0.1:8000"], 200),
        ([b"[::1]:8000"], 200),
        ([b"10.1.2.3:8000"], 200),
        ([b"model.example"], 200),
        ([b"rebind.example"], 421),
        ([b"rebind.example:8000"], 421),
        ([b"localhost.rebind.example"], 421),
        ([b"127.0.0.1.rebind.example"], 421),
        ([b"10.9.9.9"], 421),
        ([b""], 421),
        ([], 421),
        ([b"localhost", b"rebind.example"], 421),
        ([b"rebind.example", b"localhost"], 421),
    ],
)
def test_without_a_key_only_requests_meant_for_this_server_are_heard(hosts: list[bytes], status: int) -> None:
    """A page whose name was made to point here has the browser send that name."""
    assert asyncio.run(status_for_host(*hosts)) == status
    assert asyncio.run(status_for_host(*hosts, path="/live")) == 200
    assert asyncio.run(status_for_host(*hosts, keys=("one",))) == 200


def test_bodies_held_at_once_are_bounded_and_no_key_fills_them_all() -> None:
    """A client that sends no end of large bodies, and one that sends a small one."""

    async def scene() -> tuple[list[int], int]:
        held = asyncio.Event()

        async def hold(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await held.wait()
            await hello(scope, receive, send)

        app = Guard(hold, KeyRing(["greedy", "honest"]), max_body=1000)

        async def ask(key: bytes, size: int) -> int:
            statuses: list[int] = []

            async def send(message: Message) -> None:
                statuses.append(message.get("status", 0))

            async def receive() -> Message:
                return {"type": "http.request", "body": b"x" * size, "more_body": False}

            scope = {"type": "http", "path": "/x", "method": "POST", "headers": [(b"authorization", b"Bearer " + key)]}
            try:
                await app(scope, receive, send)
            except ApiError as error:
                return error.status_code
            return statuses[0]

        greedy = [asyncio.create_task(ask(b"greedy", 1000)) for _ in range(64)]
        await asyncio.sleep(0)
        honest = asyncio.create_task(ask(b"honest", 1000))
        await asyncio.sleep(0)
        held.set()
        return list(await asyncio.gather(*greedy)), await honest

    greedy, honest = timeless.run(scene())
    assert honest == 200
    assert greedy.count(200) == 12
    assert greedy.count(429) == 52


def test_every_route_of_a_real_server_needs_the_key(locked: tuple[Server, Path]) -> None:
    server, certificate = locked
    assert server.url.startswith("https://127.0.0.1:")
    trust = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(base_url=server.url, verify=trust, timeout=60) as client:
        for path in OPEN:
            assert client.get(path).status_code == 200, path
        for path in ROUTES:
            assert client.get(path).status_code == 401, path
        for path in POSTS:
            refused = client.post(path, json={})
            assert refused.status_code == 401, path
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for key in ("from-flag", "from-file", "another"):
            headers = {"authorization": f"Bearer {key}"}
            assert client.get("/v1/models", headers=headers).status_code == 200
            assert client.get("/metrics", headers=headers).status_code == 200
    assert "from-flag" not in server.text
    assert "from-file" not in server.text


def test_a_key_given_as_a_flag_does_not_stay_in_the_process_list(locked: tuple[Server, Path]) -> None:
    server, _ = locked
    everyone = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    assert len(everyone) > 2
    assert "--api-key" in everyone[0].cmdline()
    assert not any("from-flag" in argument for process in everyone for argument in process.cmdline())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key, and that key behind a password."""
    folder = tmp_path_factory.mktemp("certificates")
    _, key = make_certificate(folder)
    lock = ("openssl", "rsa", "-aes128", "-passout", "pass:abc", "-in", str(key), "-out", str(folder / "locked.pem"))
    subprocess.run(lock, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tls_cert": "cert.pem"}, "one is missing"),
        ({"tls_key": "key.pem"}, "one is missing"),
        ({"tls_cert": "cert.pem", "tls_key": "nowhere.pem"}, "--tls-key .*nowhere.pem cannot be read"),
        ({"tls_cert": "nowhere.pem", "tls_key": "key.pem"}, "--tls-cert .*nowhere.pem cannot be read"),
        ({"tls_cert": "key.pem", "tls_key": "key.pem"}, "no certificate and its key"),
        ({"tls_cert": "cert.pem", "tls_key": "locked.pem"}, "no certificate and its key"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_said_before_anything_starts(
    certificates: Path, options: dict[str, str], words: str
) -> None:
    paths: dict[str, Any] = {name: certificates / file for name, file in options.items()}
    with pytest.raises(ConfigError, match=words):
        serve(EngineConfig(), ServeOptions(port=0, **paths), engine_module="none")


def test_cors_is_for_the_origins_that_were_named(locked: tuple[Server, Path], server: Server) -> None:
    secure, certificate = locked
    trust = ssl.create_default_context(cafile=str(certificate))
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with httpx.Client(base_url=secure.url, verify=trust) as client:
        named = client.options("/v1/models", headers={"origin": "https://app.example"} | preflight)
        assert named.headers["access-control-allow-origin"] == "https://app.example"
        other = client.options("/v1/models", headers={"origin": "https://evil.example"} | preflight)
        assert "access-control-allow-origin" not in other.headers
    plain = httpx.get(server.url + "/v1/models", headers={"origin": "https://app.example"})
    assert "access-control-allow-origin" not in plain.headers


def test_it_listens_on_loopback_unless_told(server: Server) -> None:
    assert server.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "options", [("--api-key", ""), ("--api-key-file", "/dev/null"), ("--api-key-file", "/nowhere")]
)
def test_an_empty_key_does_not_open_the_server(tiny_chat: Path, tmp_path: Path, options: tuple[str, str]) -> None:
    with pytest.raises(AssertionError, match="error bad_option"), running(tiny_chat, tmp_path, *options):
        pass


@pytest.mark.parametrize(
    ("announced", "sent", "fits"), [(10, 10, True), (None, 10, True), (11, 0, False), (None, 11, False)]
)
def test_a_body_ends_at_its_limit_whether_it_was_announced_or_not(announced: int | None, sent: int, fits: bool) -> None:
    left = deque(b"x" * sent)
    answers: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes([left.popleft()]), "more_body": bool(left)}

    async def read_body(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        answers.append(200)

    async def send(message: Message) -> None:
        answers.append(message.get("status", 0))

    headers = [(b"content-length", str(announced).encode())] if announced is not None else []
    scope = {"type": "http", "path": "/x", "method": "POST", "headers": [(b"host", b"localhost"), *headers]}
    try:
        asyncio.run(Guard(read_body, KeyRing(), max_body=10)(scope, receive, send))  # type: ignore[arg-type]
    except ApiError as error:
        answers.append(error.status_code)
    assert answers[0] == (200 if fits else 413)


@pytest.mark.parametrize("pause_s", [600, 1], ids=["stops", "trickles"])
def test_a_body_that_takes_too_long_is_given_up(pause_s: float) -> None:
    async def slowly() -> Message:
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": b"", "more_body": True}

    async def read_body(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    async def send(message: Message) -> None:
        return None

    async def run() -> None:
        scope = {"type": "http", "path": "/x", "method": "POST", "headers": [(b"host", b"localhost")]}
        async with asyncio.timeout(guard.BODY_TIMEOUT_S + 1):
            await Guard(read_body, KeyRing(), max_body=10)(scope, slowly, send)

    with pytest.raises(Exception, match="not complete") as caught:
        timeless.run(run())
    assert caught.value.status_code == 408  # type: ignore[attr-defined]
