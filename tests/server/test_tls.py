"""TLS: connections that say nothing, or not what is expected, and the whole corpus of hostile requests behind it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from phalanx.server import arrivals
from phalanx.server.arrivals import Arrivals
from phalanx.server.door import Door
from phalanx.server.http import BoundedHttp
from phalanx.server.options import ServeOptions
from phalanx.server.tls import tls_context
from tests.server.conftest import make_certificate
from tests.server.running import Server
from tests.server.test_hostile import COMPLETIONS, CORPUS
from tests.server.test_http import echo

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


@asynccontextmanager
async def served(certificate: tuple[Path, Path], door: Door) -> AsyncIterator[tuple[str, int]]:
    """Where an application that echoes listens, over TLS."""
    context = tls_context(ServeOptions(tls_cert=certificate[0], tls_key=certificate[1]))
    config = uvicorn.Config(echo, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
    config.load()
    assert context is not None

    listener = socket.create_server(("127.0.0.1", 0))
    make = partial(BoundedHttp, config, ServerState(), {}, door=door)
    server = Arrivals(listener, door, make, context)
    try:
        yield listener.getsockname()
    finally:
        server.close()
        listener.close()


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scene(), 20))


async def ask(where: tuple[str, int], certificate: Path) -> bytes:
    """One request over a connection of its own."""
    reader, writer = await asyncio.open_connection(*where, ssl=trusting(certificate))
    writer.write(b"GET /x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


def test_those_who_never_shake_hands_are_counted_and_the_oldest_of_them_go(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "HANDSHAKE_TIMEOUT_S", 600)
    door = Door(16)

    async def scene() -> None:
        async with served(certificate, door) as where:
            silent = [await asyncio.open_connection(*where) for _ in range(60)]
            assert (await ask(where, certificate[0])).endswith(b"/x 0")
            assert await silent[0][0].read() == b"", "turned out"
            while door._inside.total() > 12:
                await asyncio.sleep(0)
            assert door._inside.total() <= 12
            for _, writer in silent:
                writer.close()
            while door._inside:
                await asyncio.sleep(0)

    run(scene)
    assert not door._idle


def test_a_handshake_has_its_time(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "HANDSHAKE_TIMEOUT_S", 0.05)
    door = Door(16)

    async def scene() -> None:
        async with served(certificate, door) as where:
            for begun in (b"", b"\x16\x03\x01\x02\x00\x01"):
                reader, writer = await asyncio.open_connection(*where)
                writer.write(begun)
                assert await reader.read() == b""
                writer.close()
            while door._inside:
                await asyncio.sleep(0)

    run(scene)


@pytest.mark.parametrize(
    "said",
    [b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\x00" * 70_000, b"\xff" * 1000],
    ids=["plain HTTP", "a hello of zeros", "noise"],
)
def test_what_is_no_handshake_is_ended_and_leaves_nothing(
    certificate: tuple[Path, Path], said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    door = Door(16)

    async def scene() -> None:
        async with served(certificate, door) as where:
            reader, writer = await asyncio.open_connection(*where)
            writer.write(said)
            with suppress(ConnectionError):
                assert b"HTTP/1.1 200" not in await reader.read()
            writer.close()
            assert (await ask(where, certificate[0])).endswith(b"/x 0")
            while door._inside:
                await asyncio.sleep(0)

    run(scene)
    assert "Traceback" not in capfd.readouterr().err


def test_a_request_that_comes_with_the_end_of_the_handshake_is_heard(certificate: tuple[Path, Path]) -> None:
    """Both in one packet, as a client in a hurry sends them."""

    async def scene() -> None:
        async with served(certificate, Door(16)) as where:
            assert (await asyncio.to_thread(in_one_packet, where, certificate[0])).startswith(b"HTTP/1.1 200")

    run(scene)


def in_one_packet(where: tuple[str, int], certificate: Path) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting(certificate).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection(where, timeout=30) as connection:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        client.write(b"GET /early HTTP/1.1\r\nhost: localhost\r\n\r\n")
        connection.sendall(outgoing.read())
        answer = b""
        while not answer.endswith(b"/early 0"):
            try:
                answer += client.read(65536)
            except ssl.SSLWantReadError:
                incoming.write(connection.recv(65536))
        return answer


def test_hostile_requests_over_tls_are_told_what_is_wrong(locked: tuple[Server, Path]) -> None:
    server, certificate = locked
    headers = {"authorization": "Bearer another", "content-type": "application/json"}
    with httpx.Client(base_url=server.url, verify=trusting(certificate), headers=headers, timeout=60) as client:
        for name, (path, body) in CORPUS.items():
            content = body if isinstance(body, bytes | str) else json.dumps(body)
            answer = client.post(path, content=content)
            assert 400 <= answer.status_code < 500, (name, answer.text)
            assert 10 < len(answer.json()["error"]["message"]) < 600, name
        answer = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200
    assert "Traceback" not in server.text


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /live HTTP/1.1\r\nx: " + b"y" * 200_000, b"431"),
        (b"GET /live HTTP/1.1\r\ncontent-length: -5\r\n\r\n", b"400"),
        (b"\x00" * 20, b"400"),
    ],
    ids=["a long header", "negative length", "noise"],
)
def test_a_head_beyond_its_bounds_is_refused_over_tls(locked: tuple[Server, Path], head: bytes, status: bytes) -> None:
    server, certificate = locked
    host, port = server.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        connection = trusting(certificate).wrap_socket(raw, server_hostname=host)
        answer = b""
        with suppress(OSError):
            connection.sendall(head)
            while piece := connection.recv(65536):
                answer += piece
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
