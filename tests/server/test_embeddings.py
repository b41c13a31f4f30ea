"""Embeddings by the official SDK are transformers' own hidden states, pooled; and what cannot be is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx import LLM, SamplingParams
from phalanx.errors import ConfigError, RequestError
from phalanx.spec.pooling import Pooling, pooling_of
from tests.conftest import LOGIT_NOISE, Reference
from tests.server.running import Server
from tests.threaded_ranks import ThreadedEngine

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

TEXTS = ["A rank", "Whole units are dealt to ranks, as evenly as they go.", "x"]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def states(model: Any, tokens: list[int]) -> torch.Tensor:
    """Behind the last norm."""
    with torch.inference_mode():
        return model.model(torch.tensor([tokens])).last_hidden_state[0]


@pytest.fixture(scope="module")
def expected(tiny_chat: Path) -> dict[str, torch.Tensor]:
    """By text, the last token's state at length 1."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_chat).eval(), AutoTokenizer.from_pretrained(tiny_chat)
    return {text: torch.nn.functional.normalize(states(model, tokenizer.encode(text))[-1], dim=0) for text in TEXTS}


def close(found: list[float], wanted: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(found), wanted, atol=1e-4, rtol=0)


def test_the_sdk_gets_what_transformers_computes(client: OpenAI, expected: dict[str, torch.Tensor]) -> None:
    """The SDK asks for base64 and unpacks it; floats, tokens and a single text come to the same; so does a second
    time, when the text is in the prefix cache.
    """
    for _ in range(2):
        answer = client.embeddings.create(model="tiny", input=TEXTS)
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert all(close(each.embedding, expected[text]) for each, text in zip(answer.data, TEXTS, strict=True))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 10
    floats = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float")
    assert close(floats.data[0].embedding, expected[TEXTS[0]])
    tokens = client.post("/../tokenize", body={"prompt": TEXTS[1]}, cast_to=object)["tokens"]  # type: ignore[index]
    assert close(client.embeddings.create(model="tiny", input=[tokens]).data[0].embedding, expected[TEXTS[1]])


def test_more_texts_than_the_server_has_places(client: OpenAI, expected: dict[str, torch.Tensor]) -> None:
    answer = client.embeddings.create(model="tiny", input=TEXTS * 100)
    assert len(answer.data) == 300
    assert all(close(each.embedding, expected[TEXTS[each.index % 3]]) for each in answer.data)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "dimensions": 7}, "dimensions"),
        ({"input": [[1]] * 2049}, "input"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": []}, "input"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client: OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", **body)
    assert param in str(caught.value)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_mean_of_a_prompt_in_parts_is_that_of_all_its_states(
    references: Callable[[str], Reference], tp: int
) -> None:
    """Chunks, slots that are given anew, prompts that are in the cache already, and preemption."""
    reference = references("llama")
    engine = ThreadedEngine(reference.folder, tp=tp, num_blocks=64)
    for pooling in ("mean", "mean", "last", "last"):
        requests = engine.generate(reference.prompts, SamplingParams(max_tokens=0, pooling=pooling))
        for prompt, request in zip(reference.prompts, requests, strict=True):
            found = torch.frombuffer(bytearray(request.embedding), dtype=torch.float32)
            wanted = states(reference.model, prompt)
            torch.testing.assert_close(
                found, wanted.mean(0) if pooling == "mean" else wanted[-1], atol=LOGIT_NOISE, rtol=0
            )
            assert pooling == "last" or request.cached_tokens == 0
    assert sum(request.cached_tokens for request in requests) > 0
    engine.close()


def test_llm_embeds(tiny_llama: Path) -> None:
    with LLM(tiny_llama, progress=False, num_blocks=64, max_model_len=128) as llm:
        both = llm.embed([[1, 2, 3], [4, 5]], pooling="mean")
        assert llm.embed([4, 5], pooling="mean") == pytest.approx(both[1], abs=1e-4)
        assert sum(number * number for number in both[0]) == pytest.approx(1)
        with pytest.raises(RequestError, match="not for tokens"):
            llm.generate([1], SamplingParams(pooling="mean"))


def test_a_models_files_say_how_it_pools(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == Pooling("last", normalised=True)
    kinds = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"1_{kind}"} for kind in ("Transformer", "Pooling")
    ]
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}))
    assert pooling_of(tmp_path) == Pooling("mean", False, "pooling_mode_mean_tokens")
    assert pooling_of(tmp_path, "last").kind == "last"
    config.write_text(json.dumps({"pooling_mode_cls_token": True}))
    assert pooling_of(tmp_path).kind is None
    config.unlink()
    assert pooling_of(tmp_path) == Pooling(None, False, "that of 1_Pooling/config.json, which is not there")
    with pytest.raises(ConfigError, match="max"):
        pooling_of(tmp_path, "max")
