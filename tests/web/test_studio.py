"""The studio stands behind the same guard, bounds and timers as the server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import httpx
import pytest
from fastapi.testclient import TestClient

from phalanx.web.studio import guarded_studio


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(guarded_studio({"127.0.0.1"}), base_url="http://127.0.0.1:8800")


def test_a_page_of_another_name_is_not_heard(client: TestClient) -> None:
    for path in ("/", "/cockpit/about", "/cockpit/layout/choices"):
        assert client.get(path).status_code in (200, 404)
        assert client.get(path, headers={"host": "rebind.example"}).status_code == 421


def test_a_large_body_is_refused_before_it_is_read(client: TestClient) -> None:
    refused = client.post("/cockpit/plan", content=b"{" + b" " * 20_000, headers={"content-type": "application/json"})
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "body_too_large"


def test_a_body_with_many_mistakes_costs_little(client: TestClient) -> None:
    many = {f"x{index}": 1 for index in range(1000)}
    assert client.post("/cockpit/plan", json=many).status_code == 400


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_real_one_refuses_what_has_no_end_and_ends_in_order(signum: signal.Signals) -> None:
    command = [sys.executable, "-m", "phalanx.cli", "studio", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1].rstrip("/")
        assert httpx.get(url + "/live", timeout=60).status_code == 404
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"POST /cockpit/plan HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 200000000\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 1000 + b"\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 431")
        process.send_signal(signum)
        assert process.wait(60) in (0, -signal.SIGTERM)
