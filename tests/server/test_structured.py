"""Answers of a given form, through the OpenAI SDK and a real server: a random model cannot but keep to them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.server.running import Server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

HELLO = [{"role": "user", "content": "Hello, who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "London"]},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 50},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["city", "degrees", "tags"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Now", "parameters": SCHEMA}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": NOTHING}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def chat(client: OpenAI, **options: Any) -> Any:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "temperature": 1.3} | options
    return client.chat.completions.create(**asked)


class Report(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-50, le=50)


def test_the_sdk_parses_answers_into_its_own_models(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=HELLO, max_tokens=200, temperature=1.3, response_format=Report
    )
    assert isinstance(answer.choices[0].message.parsed, Report)
    assert answer.choices[0].finish_reason == "stop"


def test_every_choice_keeps_to_a_schema(client: OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = chat(client, response_format=wanted, n=6, seed=3)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_stream_keeps_to_a_schema_too(client: OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    chunks = list(chat(client, response_format=wanted, stream=True))
    jsonschema.validate(json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks)), SCHEMA)


def test_any_json_object(client: OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=40)
    assert re.match(r"\s*\{", answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[0-9]{4}-(0[1-9]|1[0-2])"}, r"\d{4}-(0[1-9]|1[0-2])"),
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, "a[bc]d"),
        ({"json": {"type": "integer", "minimum": 1, "maximum": 7}}, "[1-7]"),
        ({"json": '{"enum": ["x", 5]}'}, '"x"|5'),
        ({"structural_tag": '{"format": {"type": "const_string", "value": "ok"}}'}, "ok"),
    ],
)
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_other_forms(server: Server, form: dict, pattern: str, endpoint: str) -> None:
    body = {"prompt": "abc"} if endpoint == "/v1/completions" else {"messages": HELLO}
    body |= {"structured_outputs": form, "max_tokens": 64, "temperature": 1.5}
    answer = httpx.post(server.url + endpoint, json=body, timeout=120).json()
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert re.fullmatch(pattern, text), text
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_a_call(client: OpenAI, choice: Any) -> None:
    answer = chat(client, tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False, seed=1)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    (call,) = message.tool_calls
    assert call.id.startswith("call_")
    if isinstance(choice, dict):
        assert call.function.name == "get_weather"
    if call.function.name == "get_weather":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    else:
        assert json.loads(call.function.arguments) == {}


def test_a_streamed_call_adds_up_to_the_whole_one(client: OpenAI) -> None:
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "seed": 11}
    (whole,) = chat(client, **forced).choices[0].message.tool_calls
    deltas = [
        delta for chunk in chat(client, **forced, stream=True) for delta in chunk.choices[0].delta.tool_calls or []
    ]
    assert deltas[0].function.name == "get_weather"
    assert deltas[0].type == "function"
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert "".join(delta.function.arguments for delta in deltas) == whole.function.arguments


def test_without_a_choice_the_model_may_answer_in_words(client: OpenAI) -> None:
    answer = chat(client, tools=[WEATHER], max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"


def test_with_tools_and_a_form_an_answer_calls_or_is_of_that_form(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    kinds = set()
    for seed in range(4):
        message = chat(client, tools=[WEATHER], response_format=form, seed=seed, temperature=1).choices[0].message
        kinds.add("call" if message.tool_calls else json.loads(message.content))
    assert kinds <= {"call", 1, 2}
    forced = chat(client, tools=[WEATHER], response_format=form, tool_choice="required")
    assert forced.choices[0].message.tool_calls


def test_unconstrained_neighbours_are_not_touched(client: OpenAI) -> None:
    def plain(_: int) -> str:
        return chat(client, temperature=0, max_tokens=40).choices[0].message.content

    alone = plain(0)
    with ThreadPoolExecutor(4) as pool:
        forced = pool.submit(chat, client, tools=[WEATHER], tool_choice="required")
        assert set(pool.map(plain, range(3))) == {alone}
        assert forced.result().choices[0].message.tool_calls


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"extra_body": {"structured_outputs": {"regex": "a" * 100_000}}}, "bytes"),
        ({"extra_body": {"structured_outputs": {"json": {"type": "string", "format": "nonsense"}}}}, "format"),
    ],
)
def test_forms_that_cannot_be_kept_are_refused(client: OpenAI, options: dict, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        chat(client, **options)
