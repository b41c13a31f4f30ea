"""The official OpenAI SDK, unchanged, against a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI

from tests.server.running import Server, eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

HELLO = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer._request_id is not None


def test_a_stream_adds_up_to_the_whole_answer(client: OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_include_usage_no_chunk_has_usage(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_several_choices_each_with_a_seed_of_their_own(client: OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 16, "n": 3, "seed": 5, "temperature": 1.0}
    answer = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    again = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in again.choices] == texts
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48


def test_streamed_choices_are_told_apart(client: OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 10, "n": 2, "seed": 5}
    whole = client.chat.completions.create(**asked)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]


def test_logprobs_of_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob
        assert [top.logprob for top in token.top_logprobs] == sorted(top.logprob for top in token.top_logprobs)[::-1]
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content).decode(errors="replace") == (
        answer.choices[0].message.content
    )


def test_completions_by_text_and_by_tokens_agree(client: OpenAI, server: Server) -> None:
    text = "The quick brown fox"
    tokens = httpx.post(server.url + "/tokenize", json={"prompt": text}).json()["tokens"]
    by_text = client.completions.create(model="tiny", prompt=text, max_tokens=8, temperature=0)
    by_tokens = client.completions.create(model="tiny", prompt=tokens, max_tokens=8, temperature=0)
    both = client.completions.create(model="tiny", prompt=[tokens, tokens], max_tokens=8, temperature=0)
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert [choice.text for choice in both.choices] == [by_text.choices[0].text] * 2


def test_echo_puts_the_prompt_before_the_text(client: OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == "Once upon a time" + plain
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, echo=True, stream=True))
    assert streamed == "Once upon a time" + plain


def test_logprobs_of_completions_say_where_each_token_begins(client: OpenAI) -> None:
    choice = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logprobs=2, temperature=0).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:index])) for index in range(5)]
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert [max(top.values()) for top in logprobs.top_logprobs] == logprobs.token_logprobs


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = max(text[5:].split("\0"), key=len)[:3]  # a text of no meaning may hold what no stop string may
    stopped = client.completions.create(**asked, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]


def test_the_prefix_cache_shows_in_usage(client: OpenAI) -> None:
    long = [{"role": "user", "content": "One two three four five six seven eight nine ten. " * 4}]
    first = client.chat.completions.create(model="tiny", messages=long, max_tokens=1)
    second = client.chat.completions.create(model="tiny", messages=long, max_tokens=1)
    assert second.usage is not None
    assert first.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == (first.usage.prompt_tokens - 1) // 16 * 16


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "other"}, openai.NotFoundError, "not served here"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 1000}]}, openai.BadRequestError, "context"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, openai.BadRequestError, "chat_template"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, "messages"),
        ({"top_logprobs": 2}, openai.BadRequestError, "logprobs"),
        ({"n": 100, "max_tokens": 1, "extra_body": {"n": 10**9}}, openai.BadRequestError, "n"),
    ],
)
def test_what_cannot_be_served_raises_the_sdk_s_own_exceptions(
    client: OpenAI, changes: dict, error: type[openai.APIStatusError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        client.chat.completions.create(**({"model": "tiny", "messages": HELLO, "max_tokens": 4} | changes))
    assert caught.value.body["type"] in ("invalid_request_error", "not_found_error")


def test_unknown_fields_are_named_in_a_header(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=[HELLO[0] | {"mood": "good"}], max_tokens=1, extra_body={"colour": "red"}
    )
    assert raw.headers["x-phalanx-warning"] == "unknown fields ignored: colour, messages.0.mood"


def test_the_request_id_of_the_client_comes_back(server: Server) -> None:
    answer = httpx.post(
        server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    line = r"mine-1 POST /v1/completions status=200 ms=\S+ prompt=1 cached=0 output=1"
    assert eventually(lambda: re.search(line, server.text))
