"""Models from a hub on loopback: fetched, broken off, damaged, and not for everyone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COMMIT = "a" * 40
WEIGHTS = bytes(range(256)) * 2**16 + b"end"
"""More than the client holds before it writes: what is cut off within that is fetched again."""
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "notes.md": b"# not asked for"}


class Hub:
    """As much of the hub as a download needs. `broken` cuts the first answer short, `damaged` changes its bytes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.broken = self.damaged = False
        self.token: str | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                if hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
                    self._send(401, {"x-error-code": "GatedRepo"}, b"")
                elif path.startswith("/api/models/some/model/tree/"):
                    self._send(200, {"content-type": "application/json"}, json.dumps(tree()).encode())
                elif path.startswith("/api/models/some/model"):
                    self._send(200, {"content-type": "application/json"}, json.dumps(described()).encode())
                elif path.rpartition("/")[2] not in FILES:
                    self._send(404, {}, b"")
                else:
                    self._file(path.rpartition("/")[2], with_body)

            def _file(self, name: str, with_body: bool) -> None:
                body, asked = FILES[name], self.headers.get("range")
                headers = {"etag": f'"{checksum(name)}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
                if not with_body:
                    self._send(200, headers | {"content-length": str(len(body))}, b"")
                    return
                hub.asked.append((name, asked))
                start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
                rest = body[start:]
                if hub.damaged and name.endswith("safetensors"):
                    rest = b"\xff" + rest[1:]
                if asked:
                    headers["content-range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                cut = hub.broken and name.endswith("safetensors")
                self._send(206 if asked else 200, headers | {"content-length": str(len(rest))}, rest, cut)

            def _send(self, status: int, headers: dict[str, str], body: bytes, cut: bool = False) -> None:
                self.send_response(status)
                for name, value in ({"content-length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if cut:
                    hub.broken = False
                    body, self.close_connection = body[: len(body) * 2 // 3], True
                self.wfile.write(body)

            def log_message(self, *words: object) -> None: ...

        return Handler


def checksum(name: str) -> str:
    """Git's own of small files, SHA-256 of large ones."""
    if name.endswith("safetensors"):
        return hashlib.sha256(FILES[name]).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(FILES[name]) + FILES[name]).hexdigest()


def described() -> dict:
    siblings: list[dict] = []
    for name, body in FILES.items():
        lfs = {"lfs": {"sha256": checksum(name), "size": len(body), "pointerSize": 100}}
        of_git = "0" * 40 if name.endswith("safetensors") else checksum(name)
        siblings.append({"rfilename": name, "size": len(body), "blobId": of_git} | (lfs if of_git[0] == "0" else {}))
    return {"id": "some/model", "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}


def tree() -> list[dict]:
    """The same, as the list of a folder."""
    return [
        {"type": "file", "path": file["rfilename"], "size": file["size"], "oid": file["blobId"]}
        | ({"lfs": {"oid": file["lfs"]["sha256"], "size": file["size"], "pointerSize": 100}} if "lfs" in file else {})
        for file in described()["siblings"]
    ]


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.close()


def phalanx(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"} | variables
    command = [sys.executable, "-m", "phalanx.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_a_model_is_fetched_goes_on_where_it_was_cut_and_is_listed(hub: Hub, tmp_path: Path) -> None:
    hub.broken = True
    done = phalanx(hub, tmp_path, "pull", "some/model")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not (folder / "notes.md").exists()
    ranges = [asked for name, asked in hub.asked if name == "model.safetensors"]
    assert ranges[0] is None
    assert ranges[1] is not None
    assert 0 < int(ranges[1].removeprefix("bytes=").strip("-")) <= len(WEIGHTS) * 2 // 3
    (listed,) = json.loads(phalanx(hub, tmp_path, "models", "--local", "--json").stdout)
    assert (listed["id"], listed["model_type"], listed["served"]) == ("some/model", "llama", True)
    assert listed["folder"] == str(folder)


def test_a_damaged_file_is_found_removed_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.damaged = True
    done = phalanx(hub, tmp_path, "pull", "some/model")
    assert done.returncode == 1
    assert "model.safetensors is not what some/model has" in done.stderr
    hub.damaged = False
    assert phalanx(hub, tmp_path, "pull", "some/model").returncode == 0


def test_a_model_with_terms_takes_a_token(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_mine"
    done = phalanx(hub, tmp_path, "pull", "some/model")
    assert done.returncode == 1
    assert "accepted its terms" in done.stderr
    assert "Traceback" not in done.stderr
    assert phalanx(hub, tmp_path, "pull", "some/model", "--token", "hf_mine").returncode == 0
