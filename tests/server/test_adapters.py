"""Adapters of a running server: asked for by name, listed, loaded and unloaded by key."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from phalanx.server.adapter_routes import LoadAdapterRequest
from tests.conftest import LOGIT_NOISE
from tests.lora import merged, write_adapter
from tests.server.running import running

pytestmark = pytest.mark.slow

PROMPT = list(range(5, 45))
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folders(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, folder = AutoModelForCausalLM.from_pretrained(tiny_chat), tmp_path_factory.mktemp("adapters")
    torch.manual_seed(1)
    return {name: write_adapter(model, folder / name, 4) for name in ("first", "second")}


@pytest.fixture(scope="module")
def client(
    tiny_chat: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    options = ("--tp", "2", "--served-model-name", "tiny", "--api-key", "secret", "--lora-memory", "1000000")
    folder = tmp_path_factory.mktemp("server")
    with running(tiny_chat, folder, *options, "--lora", f"first={folders['first']}") as server:
        yield httpx.Client(base_url=server.url, headers=KEY, timeout=120)


def scores(client: httpx.Client, model: str) -> list[float]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 0, "logprobs": 0, "echo": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"][1:]


def expected(model: Any) -> Any:
    with torch.inference_mode():
        told = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], -1)
    return pytest.approx([float(told[at - 1, token]) for at, token in enumerate(PROMPT) if at], abs=4 * LOGIT_NOISE)


def change(client: httpx.Client, what: str, **body: str) -> httpx.Response:
    return client.post(f"/v1/{what}_lora_adapter", json=body)


def test_adapters_come_and_go(client: httpx.Client, tiny_chat: Path, folders: dict[str, Path]) -> None:
    """One life of two adapters, beside the model itself."""
    model = AutoModelForCausalLM.from_pretrained(tiny_chat).eval()
    changed = {name: expected(merged(model, folder)) for name, folder in folders.items()}
    assert client.post("/v1/completions", json={"model": "second", "prompt": "a"}).status_code == 404
    loaded = change(client, "load", lora_name="second", lora_path=str(folders["second"]))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    names = ["tiny", "first", "second"]
    listed = client.get("/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [("tiny", None), ("first", "tiny"), ("second", "tiny")]
    with ThreadPoolExecutor(6) as threads:
        told = list(threads.map(lambda name: scores(client, name), names * 2))
    for name, found in zip(names * 2, told, strict=True):
        assert found == changed.get(name, expected(model))
    chat = {"model": "second", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert client.post("/v1/chat/completions", json=chat).json()["model"] == "second"
    embedded = [client.post("/v1/embeddings", json={"model": name, "input": "a"}).json() for name in names]
    assert len({str(each["data"][0]["embedding"][:4]) for each in embedded}) == 3
    assert change(client, "unload", lora_name="second").status_code == 200
    assert client.post("/v1/chat/completions", json=chat).status_code == 404
    assert change(client, "unload", lora_name="second").status_code == 404
    assert client.get("/v1/models/second").status_code == 404
    assert scores(client, "first") == changed["first"]


def test_what_cannot_be_loaded_is_refused_by_name(
    client: httpx.Client, folders: dict[str, Path], tmp_path: Path
) -> None:
    second = str(folders["second"])
    for body, told in (
        ({"lora_name": "first", "lora_path": second}, "first"),
        ({"lora_name": "tiny", "lora_path": second}, "model itself"),
        ({"lora_name": "other", "lora_path": str(tmp_path)}, "adapter_config.json"),
        ({"lora_name": "other", "lora_path": "/etc/passwd"}, "adapter_config.json"),
        ({"lora_name": "other"}, "lora_path"),
        ({"lora_name": "other", "lora_path": "x" * 10_000}, "lora_path"),
        ({"lora_name": 3, "lora_path": second}, "lora_name"),
    ):
        answer = change(client, "load", **body)  # type: ignore[arg-type]
        assert (answer.status_code, told in answer.text) == (400, True), answer.text
    for spoilt in (b"", b"[", b"[1]", b'{"lora_name": "\xff"}'):
        answer = client.post("/v1/load_lora_adapter", content=spoilt, headers={"content-type": "application/json"})
        assert answer.status_code == 400
    assert httpx.post(client.base_url.join("/v1/load_lora_adapter"), json={}).status_code == 401


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "\x85", ""])
def test_a_name_is_one_that_a_line_of_the_log_can_hold(name: str) -> None:
    with pytest.raises(ValidationError):
        LoadAdapterRequest(lora_name=name, lora_path="/x")
    assert LoadAdapterRequest(lora_name="Größe/1.5:x", lora_path="/x").lora_name == "Größe/1.5:x"
