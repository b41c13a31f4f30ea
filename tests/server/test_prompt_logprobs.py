"""Log-probabilities of prompts over HTTP, by the requests that lm_eval sends, and in the shape that vLLM gives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import LOGIT_NOISE
from tests.server.running import Server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

CONTEXT, CHOICES = "A tiny model is", [" sharded over two ranks", " what this is", " Rank"]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tiny_chat: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_chat)


@pytest.fixture(scope="module")
def model(tiny_chat: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_chat).eval()


def scores(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of what follows each token."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"model": "tiny", "temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lm_eval_loglikelihood(choice: dict[str, Any], context_tokens: int) -> tuple[float, bool]:
    """What lm_eval's LocalCompletionsAPI.parse_logprobs makes of a choice: the last token is the one that was made."""
    told = choice["logprobs"]
    tokens, likeliest = told["token_logprobs"][context_tokens:-1], told["top_logprobs"][context_tokens:-1]
    greedy = all(token == max(top.values()) for token, top in zip(tokens, likeliest, strict=True))
    return sum(tokens), greedy


def test_lm_eval_scores_choices_as_transformers_does(client: httpx.Client, tokenizer: Any, model: Any) -> None:
    """Token ids of context and choice, several at once: `loglikelihood`."""
    context = tokenizer.encode(CONTEXT)
    prompts = [context + tokenizer.encode(choice) for choice in CHOICES]
    expected = [scores(model, prompt) for prompt in prompts]
    prompts.append([*context, int(expected[0][len(context) - 1].argmax())])
    expected.append(scores(model, prompts[-1]))
    body = complete(client, prompt=prompts, max_tokens=1, logprobs=1, seed=1234, echo=True)
    for choice, prompt, logprobs in zip(body["choices"], prompts, expected, strict=True):
        total, greedy = lm_eval_loglikelihood(choice, len(context))
        ours = range(len(context), len(prompt))
        assert total == pytest.approx(sum(float(logprobs[at - 1, prompt[at]]) for at in ours), abs=1e-3)
        assert greedy == all(int(logprobs[at - 1].argmax()) == prompt[at] for at in ours)
    assert [lm_eval_loglikelihood(choice, len(context))[1] for choice in body["choices"]].count(True) >= 1


def test_perplexity_is_that_of_transformers(client: httpx.Client, tokenizer: Any, model: Any) -> None:
    """`loglikelihood_rolling`, and the older way with `max_tokens: 0`; also when the prompt is in the cache."""
    prompt = tokenizer.encode("Whole units are dealt to ranks, as evenly as they go, and not one is ever cut.")
    logprobs = scores(model, prompt)
    expected = [float(logprobs[at - 1, token]) for at, token in enumerate(prompt) if at]
    for _ in range(2):
        (choice,) = complete(client, prompt=prompt, max_tokens=0, logprobs=0, echo=True)["choices"]
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None
        assert told["token_logprobs"][1:] == pytest.approx(expected, abs=4 * LOGIT_NOISE)
        assert "".join(told["tokens"]) == choice["text"] == tokenizer.decode(prompt)
        assert told["text_offset"][-1] == len(choice["text"]) - len(told["tokens"][-1])
        assert choice["finish_reason"] == "length"
    usage = complete(client, prompt=prompt, max_tokens=0, logprobs=0, echo=True)["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (0, 0)


def test_prompt_logprobs_have_the_shape_of_vllm(client: httpx.Client, tokenizer: Any, model: Any) -> None:
    prompt = tokenizer.encode(CONTEXT)
    (choice,) = complete(client, prompt=prompt, max_tokens=2, prompt_logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for token, entry, logprobs in zip(prompt[1:], rest, scores(model, prompt), strict=False):
        assert entry[str(token)]["logprob"] == pytest.approx(float(logprobs[token]), abs=4 * LOGIT_NOISE)
        assert entry[str(token)]["decoded_token"] == tokenizer.decode([token])
        assert sorted(each["rank"] for each in entry.values())[:2] == [1, 2]
        assert len(entry) == (2 if entry[str(token)]["rank"] <= 2 else 3)
    assert choice["logprobs"] is None
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, "prompt_logprobs": 0})
    assert len(chat.json()["prompt_logprobs"]) == chat.json()["usage"]["prompt_tokens"]


def test_a_stream_begins_with_the_echo_and_its_logprobs(client: httpx.Client) -> None:
    import json

    asked: dict[str, Any] = {"prompt": CONTEXT, "max_tokens": 3, "logprobs": 1, "echo": True, "temperature": 0}
    lines = client.post("/v1/completions", json=asked | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    whole = complete(client, **asked)["choices"][0]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for part in ("tokens", "token_logprobs", "text_offset"):
        told = [each for chunk in chunks if chunk["logprobs"] for each in chunk["logprobs"][part]]
        assert told == (
            pytest.approx(whole["logprobs"][part], abs=LOGIT_NOISE) if "log" in part else whole["logprobs"][part]
        )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": [[1] * 200] * 128, "n": 16, "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_is_not_told_is_refused_by_name(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
