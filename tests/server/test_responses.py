"""The official OpenAI SDK and the agents that are built on it, unchanged, against /v1/responses."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from phalanx.errors import ConfigError
from phalanx.server.responses.store import Archive, Kept, ResponseStore, appended
from tests.server.scripted import Scripted, scripted

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'


@pytest.fixture(scope="module")
def place() -> Iterator[Scripted]:
    with scripted(keys=("one", "two")) as place:
        yield place


@pytest.fixture(scope="module")
def thinker() -> Iterator[Scripted]:
    with scripted(reasoning_parser="qwen3") as place:
        yield place


def sdk(place: Scripted, key: str = "one") -> OpenAI:
    return OpenAI(base_url=place.url + "/v1", api_key=key, max_retries=0, timeout=60)


def test_a_text_is_answered(place: Scripted) -> None:
    place.says("Hi there.")
    answer = sdk(place).responses.create(
        model="tiny", input="Hello", instructions="Be kind.", max_output_tokens=20, temperature=0.5, metadata={"a": "b"}
    )
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "tiny")
    assert answer.output_text == "Hi there."
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4
    assert answer.usage.total_tokens == answer.usage.input_tokens + 4
    told = answer.usage.output_tokens_details.to_dict()
    assert told == {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert (answer.instructions, answer.temperature, answer.metadata) == ("Be kind.", 0.5, {"a": "b"})
    assert "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>" in place.last_prompt


def test_an_answer_that_was_cut_off_says_so(place: Scripted) -> None:
    place.says("one two three four")
    answer = sdk(place).responses.create(model="tiny", input="Hello", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_goes_on_by_the_id_of_its_last_answer(place: Scripted) -> None:
    client = sdk(place)
    place.says("Blue.", "Green.", "Red.")
    first = client.responses.create(model="tiny", input="A colour?", instructions="Be brief.")
    second = client.responses.create(model="tiny", input="Another?", previous_response_id=first.id)
    third = client.responses.create(model="tiny", input="One more?", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    turns = "user\nA colour?{0}assistant\nBlue.{0}user\nAnother?{0}assistant\nGreen.{0}user\nOne more?"
    assert turns.format("<|im_end|>\n<|im_start|>") in place.last_prompt
    assert "Be brief." not in place.last_prompt, "instructions are those of one request"


def test_what_is_kept_is_found_by_the_key_that_asked_and_no_other(place: Scripted) -> None:
    place.says("Secret.", "Known.")
    kept = sdk(place).responses.create(model="tiny", input="a")
    assert sdk(place).responses.retrieve(kept.id).output_text == "Secret."
    other = sdk(place, "two")
    for reach in (
        lambda: other.responses.retrieve(kept.id),
        lambda: other.responses.delete(kept.id),
        lambda: other.responses.create(model="tiny", input="b", previous_response_id=kept.id),
        lambda: sdk(place).responses.retrieve("resp_nothing"),
    ):
        with pytest.raises(openai.NotFoundError, match="kept here"):
            reach()
    unkept = sdk(place).responses.create(model="tiny", input="a", store=False)
    with pytest.raises(openai.NotFoundError):
        sdk(place).responses.retrieve(unkept.id)
    sdk(place).responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        sdk(place).responses.retrieve(kept.id)


def test_an_agent_calls_tools_and_hears_of_them(place: Scripted) -> None:
    client = sdk(place)
    place.says("Look.\n" + CALL % "Bonn" + "\n" + CALL % "Rome", "Rain.")
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = client.responses.create(model="tiny", input=items, tools=[WEATHER], store=False)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Bonn"}, {"city": "Rome"}]
    items += first.output
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    last = client.responses.create(model="tiny", input=items, tools=[WEATHER], store=False)
    assert last.output_text == "Rain."
    assert "assistant\nLook.\n<tool_call>" in place.last_prompt
    assert place.last_prompt.count("<tool_response>\nrain\n</tool_response>") == 2


def test_the_events_of_a_stream_add_up_to_its_response(thinker: Scripted) -> None:
    thinker.says("<think>Hm.</think>Look: " + CALL % "Bonn")
    with sdk(thinker).responses.stream(model="tiny", input="Hello", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds: list[str] = []
    for event in events:
        if not kinds or kinds[-1] != event.type:
            kinds.append(event.type)
    part = ["response.content_part.added", "response.{0}.delta", "response.{0}.done", "response.content_part.done"]
    call = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        *("response.output_item.added", *(name.format("reasoning_text") for name in part), "response.output_item.done"),
        *("response.output_item.added", *(name.format("output_text") for name in part), "response.output_item.done"),
        *("response.output_item.added", *call, "response.output_item.done"),
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[0].content[0].text == "Hm."  # type: ignore[union-attr, index]
    assert final.output_text == "Look:"
    kept = sdk(thinker).responses.retrieve(final.id)
    assert kept.output_text == final.output_text
    assert [item.id for item in kept.output] == [item.id for item in final.output]


def test_thoughts_that_a_client_keeps_sealed_come_back(thinker: Scripted) -> None:
    """As a client does that stores nothing, and passes on nothing of a thought but its seal."""
    thinker.says("<think>Deep.</think>Shallow.", "<think></think>Yes")
    first = sdk(thinker).responses.create(
        model="tiny", input="a", store=False, include=["reasoning.encrypted_content"], reasoning={"effort": "low"}
    )
    thought, said = first.output
    assert thought.type == "reasoning"
    sealed: Any = {"type": "reasoning", "id": thought.id, "summary": [], "encrypted_content": thought.encrypted_content}
    items: Any = [{"role": "user", "content": "a"}, sealed, said, {"role": "user", "content": "b"}]
    read: list[Any] = []
    render = thinker.service.preparer.reader.templates.render  # type: ignore[attr-defined]
    thinker.service.preparer.reader.templates.render = lambda messages, *rest: (
        read.append(messages)
        or render(  # type: ignore[attr-defined]
            messages, *rest
        )
    )
    sdk(thinker).responses.create(model="tiny", input=items, store=False)
    assert read[-1][1].reasoning_content == "Deep."
    assert read[-1][1].content == "Shallow."


class Place(BaseModel):
    city: str


def test_a_typed_answer_is_parsed_with_tools_beside_it(place: Scripted) -> None:
    place.says('{"city": "Bonn"}')
    parsed = sdk(place).responses.parse(model="tiny", input="Where?", text_format=Place, tools=[WEATHER])
    assert parsed.output_parsed == Place(city="Bonn")
    assert '"or"' in place.grammars.asked[-1].source


def test_some_of_the_tools_may_be_called(place: Scripted) -> None:
    place.says("no", CALL % "Bonn")
    other = WEATHER | {"name": "get_time"}
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    sdk(place).responses.create(model="tiny", input="a", tools=[WEATHER, other], tool_choice=allowed)
    assert "get_time" in place.last_prompt
    assert "get_weather" not in place.last_prompt
    forced: Any = {"type": "function", "name": "get_weather"}
    sdk(place).responses.create(model="tiny", input="a", tools=[WEATHER, other], tool_choice=forced)
    assert "get_time" not in place.grammars.asked[-1].source


def test_what_an_agent_offers_beside_its_functions_is_left_out_and_named(place: Scripted) -> None:
    """As Codex does: it runs its functions itself, and works without the rest."""
    place.says("Hello.")
    others = [{"type": "web_search", "external_web_access": True}, {"type": "namespace", "name": "n", "tools": []}]
    body = {"input": "a", "tools": [WEATHER, *others], "tool_choice": "auto"}
    answer = httpx.post(place.url + "/v1/responses", json=body, headers={"authorization": "Bearer one"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-phalanx-warning"].endswith("tools.1.web_search, tools.2.namespace")
    assert [tool["name"] for tool in answer.json()["tools"]] == ["get_weather"]
    assert "web_search" not in place.last_prompt


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [{"type": "code_interpreter"}]}, "type: Input should be 'function'"),
        ({"background": True}, "background is not accepted"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_text"),
        ({"input": []}, "input has no items"),
        ({"conversation": "conv_1"}, "conversation is not accepted"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required"}, "tools is empty"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "needs a schema"),
        ({"input": "long " * 3000}, "maximum context length"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(place: Scripted, more: Any, words: str) -> None:
    answer = httpx.post(
        place.url + "/v1/responses", json={"input": "a"} | more, headers={"authorization": "Bearer one"}
    )
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    if "maximum" in words:
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_agents_with_their_defaults_call_a_tool_and_end_with_a_typed_answer(place: Scripted, stream: bool) -> None:
    import agents

    asked: list[str] = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "rain"

    client = openai.AsyncOpenAI(base_url=place.url + "/v1", api_key="one", max_retries=0)
    agents.set_tracing_disabled(True)
    model = agents.OpenAIResponsesModel(model="tiny", openai_client=client)
    agent = agents.Agent(name="a", instructions="Help.", model=model, tools=[get_weather], output_type=Place)
    place.says(CALL % "Bonn", '{"city": "Bonn"}')
    if stream:

        async def run() -> Any:
            result = agents.Runner.run_streamed(agent, "Weather?")
            async for _ in result.stream_events():
                pass
            return result.final_output

        final = asyncio.run(run())
    else:
        final = agents.Runner.run_sync(agent, "Weather?").final_output
    assert final == Place(city="Bonn")
    assert asked == ["Bonn"]


def test_the_store_is_bounded_and_takes_from_whoever_has_most() -> None:
    store = ResponseStore(most_bytes=1000)
    store.put("small", "s", Kept(b"x" * 50, b""))
    for number in range(20):
        store.put("greedy", f"g{number}", Kept(b"x" * 50, b"y" * 50))
    assert store.get("small", "s") is not None
    held = [number for number in range(20) if store.get("greedy", f"g{number}")]
    assert held == list(range(11, 20))
    store.put("greedy", "huge", Kept(b"x" * 1001, b""))
    assert store.get("greedy", "huge") is None
    assert store.get("greedy", "g19") is not None


def test_room_is_made_in_a_full_store_without_looking_at_all_of_it() -> None:
    """Thousands of small answers go for one that is large, while everyone waits."""
    store, steps = ResponseStore(most_bytes=400_000), 0

    def count() -> None:
        nonlocal steps
        steps += 1

    for number in range(4000):
        store.put("greedy", f"g{number}", Kept(b"x" * 100, b""))
    store._database.set_progress_handler(count, 100)
    store.put("greedy", "large", Kept(b"x" * 200_000, b""))
    assert store.get("greedy", "large") is not None
    assert store.get("greedy", "g1999") is None
    assert store.get("greedy", "g2000") is not None
    assert steps < 2000, f"{steps * 100 // 2000} instructions of the database for each answer that goes"


def test_nobody_waits_while_room_is_made_but_who_asks_for_what_is_kept() -> None:
    class Slow(ResponseStore):
        """Keeps an answer when it is told to."""

        go = threading.Event()

        def put(self, client: str, id: str, kept: Kept) -> None:
            assert self.go.wait(60)
            super().put(client, id, kept)

    async def scene() -> None:
        archive, kept = Archive(Slow()), Kept(b"{}", b"[]")
        archive.put("me", "id", kept)
        asked = asyncio.create_task(archive.get("me", "id"))
        await asyncio.sleep(0)
        assert not asked.done()
        Slow.go.set()
        assert await asked == kept
        assert await archive.get("you", "id") is None
        assert [await archive.delete(client, "id") for client in ("you", "me", "me")] == [False, True, False]

    asyncio.run(scene())


def test_a_conversation_grows_no_further_than_can_be_kept(place: Scripted) -> None:
    """By what no model reads, and no context bounds: it came back whole with every request that went on with it."""
    place.says(*["Yes."] * 5)
    ignored: Any = {"type": "reasoning", "summary": [], "encrypted_content": "q" * 900_000}
    body: dict[str, Any] = {"input": [{"role": "user", "content": "a"}, ignored]}
    for _ in range(4):
        body["previous_response_id"] = posted(place, body).json()["id"]
    refused = posted(place, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "conversation_too_large")
    assert posted(place, body | {"store": False}).status_code == 200


def posted(place: Scripted, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(place.url + "/v1/responses", json=body, headers={"authorization": "Bearer one"}, timeout=60)


def test_a_store_on_disk_outlives_the_server_and_is_its_owner_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path, most_bytes=1000)
    for number in range(3):
        store.put("me", f"r{number}", Kept(b"{}", b"[]"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="response-store"):
        ResponseStore(path)
    store.close()
    again = ResponseStore(path, most_bytes=8)
    assert [again.get("me", f"r{number}") for number in range(3)] == [None, Kept(b"{}", b"[]"), Kept(b"{}", b"[]")]
    assert again.delete("me", "r1")
    assert not again.delete("me", "r1")
    again.close()
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError):
        ResponseStore(path)


def test_a_store_that_fails_costs_no_answer() -> None:
    store = ResponseStore()
    store._database.close()
    with pytest.raises(sqlite3.Error):
        store._database.execute("select 1")
    store.put("me", "id", Kept(b"{}", b"[]"))


def test_items_are_appended_without_reading_them() -> None:
    assert json.loads(appended(b"[]", [{"a": 1}])) == [{"a": 1}]
    assert json.loads(appended(b'[{"b":2}]', [{"a": 1}])) == [{"b": 2}, {"a": 1}]
    assert json.loads(appended(b'[{"b":2}]', [])) == [{"b": 2}]
