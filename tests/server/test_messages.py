"""Anthropic's own SDK, unchanged, against /v1/messages: talk, tools, thoughts, streams, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from pydantic import BaseModel

from tests.server.scripted import Scripted, scripted

if TYPE_CHECKING:
    import anthropic

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'


@pytest.fixture(scope="module")
def place() -> Iterator[Scripted]:
    with scripted(keys=("secret", "other")) as place:
        yield place


@pytest.fixture(scope="module")
def thinker() -> Iterator[Scripted]:
    with scripted(reasoning_parser="qwen3") as place:
        yield place


def sdk(place: Scripted, key: str = "secret") -> anthropic.Anthropic:
    """Takes two seconds to import: only who runs these tests does."""
    from anthropic import Anthropic

    return Anthropic(base_url=place.url, api_key=key, max_retries=0, timeout=60)


def test_a_message_is_answered(place: Scripted) -> None:
    place.says("Hi there.")
    answer = sdk(place).messages.create(
        model="tiny",
        max_tokens=20,
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        messages=[*HELLO, {"role": "assistant", "content": "Hm?"}, {"role": "user", "content": "Hello again"}],
        metadata={"user_id": "me"},
        extra_body={"temperature": 0.5, "top_k": 7},
    )
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [block.text for block in answer.content if block.type == "text"] == ["Hi there."]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == 4
    assert "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>" in place.last_prompt
    assert place.last_prompt.endswith("<|im_start|>user\nHello again<|im_end|>\n<|im_start|>assistant\n")
    params = place.engine.params[-1]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 20)


def test_the_tokens_that_are_counted_are_those_that_are_asked(place: Scripted) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "system": "Be kind.", "tools": [WEATHER]}
    counted = sdk(place).messages.count_tokens(**asked).input_tokens
    place.says("Hi")
    assert counted == sdk(place).messages.create(**asked, max_tokens=5).usage.input_tokens
    assert counted > sdk(place).messages.count_tokens(model="tiny", messages=HELLO).input_tokens


@pytest.mark.parametrize(
    ("line", "more", "reason", "sequence"),
    [
        ("one two three four", {"max_tokens": 2}, "max_tokens", None),
        ("one two three", {"stop_sequences": ["zzz", " two"]}, "stop_sequence", " two"),
        (CALL % "Bonn", {"tools": [WEATHER]}, "tool_use", None),
        ("one", {}, "end_turn", None),
    ],
)
def test_a_message_tells_why_it_ends(place: Scripted, line: str, more: Any, reason: str, sequence: str | None) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 50} | more
    place.says(line, line)
    whole = sdk(place).messages.create(**asked)
    with sdk(place).messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert (whole.stop_reason, whole.stop_sequence) == (reason, sequence)
    assert (streamed.stop_reason, streamed.stop_sequence) == (reason, sequence)
    told = [
        [block.model_dump(include={"type", "text", "name", "input"}) for block in each.content]
        for each in (whole, streamed)
    ]
    assert told[0] == told[1]
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_two_tools_at_once_hears_of_them_and_answers(place: Scripted, stream: bool) -> None:
    """Three turns, in which everything that was said goes back and forth as the SDK has it."""
    client, messages = sdk(place), [*HELLO]

    def ask() -> anthropic.types.Message:
        asked: Any = {"model": "tiny", "max_tokens": 200, "messages": messages, "tools": [WEATHER]}
        if not stream:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as events:
            return events.get_final_message()

    place.says("Let me look.\n" + CALL % "Bonn" + "\n" + CALL % "Rome", CALL % "Paris", "Rain everywhere.")
    first = ask()
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert '"name": "get_weather"' in place.last_prompt, "the model is told of the tool"
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Bonn"}, {"city": "Rome"}]
    assert len({call.id for call in calls}) == 2
    messages += [
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": calls[0].id, "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": calls[1].id,
                    "content": [{"type": "text", "text": "no such city"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    second = ask()
    shown = place.last_prompt
    assert "Let me look.\n<tool_call>\n" in shown
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nError: no such city\n</tool_response>" in shown
    assert shown.index("no such city") < shown.index("Go on.")
    (call,) = second.content
    assert call.type == "tool_use"
    messages += [
        {"role": "assistant", "content": second.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id}]},
    ]
    last = ask()
    assert last.stop_reason == "end_turn"
    assert [block.text for block in last.content if block.type == "text"] == ["Rain everywhere."]


def test_events_come_in_the_order_that_anthropic_gives_them(thinker: Scripted) -> None:
    thinker.says("<think>Hm.</think>Look: " + CALL % "Bonn")
    with sdk(thinker).messages.create(
        model="tiny", max_tokens=99, messages=HELLO, tools=[WEATHER], stream=True
    ) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks: dict[int, list[str]] = {}
    for event in events:
        if event.type.startswith("content_block"):
            kind = event.delta.type if event.type == "content_block_delta" else event.type
            told = blocks.setdefault(event.index, [])
            if not told or told[-1] != kind:
                told.append(kind)
    assert list(blocks.values()) == [
        ["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"],
        ["content_block_start", "text_delta", "content_block_stop"],
        ["content_block_start", "input_json_delta", "content_block_stop"],
    ]
    raw = httpx.post(thinker.url + "/v1/messages", json=_after(thinker, {"stream": True})).text
    assert "event: ping\n" in raw
    assert "[DONE]" not in raw


def _after(place: Scripted, more: dict[str, Any]) -> dict[str, Any]:
    place.says("<think>a</think>b")
    return {"model": "tiny", "max_tokens": 9, "messages": HELLO} | more


def test_thoughts_are_blocks_and_come_back_as_thoughts(thinker: Scripted) -> None:
    thinker.says("<think>Deep.</think>Shallow.", "Yes")
    first = sdk(thinker).messages.create(
        model="tiny", max_tokens=2000, messages=HELLO, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.type for block in first.content] == ["thinking", "text"]
    assert first.content[0].thinking == "Deep."
    said: Any = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And?"}]
    sdk(thinker).messages.create(model="tiny", max_tokens=9, messages=said, thinking={"type": "disabled"})
    assert "<|im_start|>assistant\nShallow.<|im_end|>" in thinker.last_prompt


def test_an_answer_that_was_begun_is_continued(place: Scripted) -> None:
    place.says(" fish")
    begun: Any = [*HELLO, {"role": "assistant", "content": "The best is"}]
    answer = sdk(place).messages.create(model="tiny", max_tokens=9, messages=begun)
    assert place.last_prompt.endswith("<|im_start|>assistant\nThe best is")
    assert answer.content[0].text == " fish"


class Place(BaseModel):
    city: str


def test_the_form_of_an_answer_reaches_the_grammar(place: Scripted) -> None:
    place.says('{"city": "Bonn"}', CALL % "Rome")
    parsed = sdk(place).messages.parse(model="tiny", max_tokens=30, messages=HELLO, output_format=Place)
    assert parsed.parsed_output == Place(city="Bonn")
    assert json.loads(place.grammars.asked[-1].source)["properties"]["city"]["type"] == "string"
    sdk(place).messages.create(
        model="tiny",
        max_tokens=30,
        messages=HELLO,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather"},
    )
    assert "get_weather" in place.grammars.asked[-1].source


def test_one_call_at_a_time_is_one_call(place: Scripted) -> None:
    place.says(CALL % "Bonn" + CALL % "Rome")
    answer = sdk(place).messages.create(
        model="tiny",
        max_tokens=99,
        messages=HELLO,
        tools=[WEATHER],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block.input for block in answer.content if block.type == "tool_use"] == [{"city": "Bonn"}]


@pytest.mark.parametrize(
    ("more", "error", "kind", "words"),
    [
        ({"model": "claude"}, "NotFoundError", "not_found_error", "not served here"),
        ({"messages": []}, "BadRequestError", "invalid_request_error", "messages"),
        ({"extra_body": {"temperature": -1}}, "BadRequestError", "invalid_request_error", "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "BadRequestError", None, "custom"),
        ({"tool_choice": {"type": "any"}}, "BadRequestError", None, "tools is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "BadRequestError",
            None,
            "'image'",
        ),
        ({"extra_body": {"mcp_servers": [{}]}}, "BadRequestError", None, "mcp_servers is not accepted"),
        ({"messages": [{"role": "user", "content": "long " * 3000}]}, "BadRequestError", None, "too long"),
    ],
)
def test_what_cannot_be_served_raises_the_sdk_s_own_exceptions(
    place: Scripted, more: Any, error: str, kind: str | None, words: str
) -> None:
    import anthropic

    with pytest.raises(getattr(anthropic, error), match=words) as caught:
        sdk(place).messages.create(**({"model": "tiny", "max_tokens": 5, "messages": HELLO} | more))
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == kind or kind is None
    assert caught.value.request_id or caught.value.response.headers["x-request-id"]


def test_a_key_is_read_from_either_header_and_no_other_opens_the_door(place: Scripted) -> None:
    import anthropic

    with pytest.raises(anthropic.AuthenticationError) as caught:
        sdk(place, "wrong").messages.create(model="tiny", max_tokens=5, messages=HELLO)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    place.says("a", "b")
    for client in (sdk(place), anthropic.Anthropic(base_url=place.url, auth_token="other", max_retries=0)):
        assert client.messages.create(model="tiny", max_tokens=5, messages=HELLO).content
    for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "wrong"}, 401), ({}, 401)):
        assert httpx.get(place.url + "/v1/models", headers=headers).status_code == status
    wrong_first = {"authorization": "Bearer wrong", "x-api-key": "secret"}
    assert httpx.get(place.url + "/v1/models", headers=wrong_first).status_code == 401


def test_fields_nobody_reads_are_named_but_those_of_caching_are_not(place: Scripted) -> None:
    place.says("a")
    raw = sdk(place).messages.with_raw_response.create(
        model="tiny",
        max_tokens=5,
        messages=[{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}],
        extra_body={"speed": "fast"},
    )
    assert raw.headers["x-phalanx-warning"] == "unknown fields ignored: speed"


def test_an_error_in_a_stream_is_told_in_the_stream(place: Scripted) -> None:
    """A server that stops, say: what has been said stays said."""
    import anthropic

    from phalanx.server.errors import ApiError

    def broken(prompt, params, mailbox, choice, *more, **named) -> int:  # type: ignore[no-untyped-def]
        from phalanx.server.messages import NewToken

        mailbox.put(choice, NewToken(0, 28, None, 0, 0.0))
        mailbox.close(ApiError(503, "The server is stopping.", "server_stopping"))
        return 1

    place.engine.submit = broken  # type: ignore[method-assign]
    try:
        with (
            pytest.raises(anthropic.APIStatusError, match="stopping"),
            sdk(place).messages.stream(model="tiny", max_tokens=9, messages=HELLO) as stream,
        ):
            stream.get_final_message()
    finally:
        del place.engine.submit


def test_what_keeps_all_thoughts_is_taken_and_what_would_leave_some_out_is_refused(place: Scripted) -> None:
    """Claude Code sends the first with every question."""
    import anthropic

    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    place.says("Fine.")
    answer = sdk(place).messages.create(
        model="tiny", max_tokens=9, messages=HELLO, extra_body={"context_management": kept}
    )
    assert answer.content
    for edit in ({"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015", "keep": 1}, "all"):
        with pytest.raises(anthropic.BadRequestError, match="context_management is not accepted"):
            sdk(place).messages.create(
                model="tiny", max_tokens=9, messages=HELLO, extra_body={"context_management": {"edits": [edit]}}
            )
