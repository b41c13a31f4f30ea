"""Requests are read outside of the server: whatever they hold, it goes on, and so does everyone else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from phalanx.server.errors import ApiError
from phalanx.server.prepare import RequestReader
from phalanx.server.prepared import Asked, Assignment, DetokenizedText, Prepared, Problem, TokenizedText
from phalanx.server.preparer import QUICK_BYTES, Preparer
from phalanx.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest
from phalanx.text.tokenizer import Tokenizer
from phalanx.weights.checkpoint import locate
from tests.server.running import eventually, pid_of

CONTEXT = 512
VOCAB = 49152
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
LIMIT = 4 * 2**20


def assignment(template: str | None = None) -> Assignment:
    tokenizer = Tokenizer.load(locate(None))
    assert tokenizer is not None
    backend: PreTrainedTokenizerFast = tokenizer.backend
    return Assignment(
        names=["tiny"],
        tokenizer=backend.backend_tokenizer.to_str(),
        templates={"default": template} if template is not None else tokenizer.chat_templates,
        special_tokens=backend.special_tokens_map,
        vocab=VOCAB,
        context=CONTEXT,
        tool_parser="hermes",
    )


@pytest.fixture(scope="module")
def reader() -> RequestReader:
    return RequestReader(assignment())


def outcome(reader: RequestReader, kind: Any, body: object) -> Any:
    return reader.outcome(Asked(kind, body if isinstance(body, bytes) else json.dumps(body).encode()))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(locate(None))
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "é 👍 <|im_end|>"}, {"role": "user", "content": " two  spaces\n"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": ""}],
    ],
)
def test_a_chat_is_tokenised_as_transformers_does_it(
    reader: RequestReader, tokenizer: Tokenizer, messages: list[Any]
) -> None:
    prepared = outcome(reader, "chat", {"messages": messages})
    theirs = tokenizer.backend.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prepared.prompts == [theirs]
    assert outcome(reader, "tokenize", {"messages": messages}) == TokenizedText(theirs)


def test_a_text_is_tokenised_as_transformers_does_it_and_back(reader: RequestReader, tokenizer: Tokenizer) -> None:
    for text in ("", "Hello", "é 👍 <|im_end|> 123", "\n\n  x", "\u4e2d\u6587"):
        tokens = tokenizer.backend.encode(text)
        assert outcome(reader, "tokenize", {"prompt": text}) == TokenizedText(tokens)
        assert outcome(reader, "detokenize", {"tokens": tokens}) == DetokenizedText(text)


def test_text_that_no_context_holds_is_refused_before_it_is_tokenised(
    reader: RequestReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its characters alone; and where these could fit, by a small part of it."""
    lengths: list[int] = []

    class Counting:
        def __init__(self, real: Any) -> None:
            self.real = real

        def encode(self, text: str, add_special_tokens: bool) -> Any:
            lengths.append(len(text))
            return self.real.encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(reader._encoder, "_tokenizer", Counting(reader._encoder._tokenizer))
    huge, dense = "1 " * 2_000_000, "1 " * 15_000
    for text in (huge, dense):
        for kind, body in (
            ("tokenize", {"prompt": text}),
            ("tokenize", {"messages": [{"role": "user", "content": text}]}),
            ("completion", {"prompt": text}),
            ("completion", {"prompt": ["a", text]}),
            ("chat", {"messages": [{"role": "user", "content": text}]}),
        ):
            problem = outcome(reader, kind, body)
            assert (problem.status, problem.code) == (400, "context_length_exceeded")
    assert max(lengths) <= 8 * CONTEXT
    assert isinstance(outcome(reader, "tokenize", {"prompt": "word " * 1000}), TokenizedText)
    assert outcome(reader, "detokenize", {"tokens": [1] * (CONTEXT + 1)}).code == "context_length_exceeded"


WRONG = {
    "items that are no tokens": (DetokenizeRequest, b'{"tokens":[' + b'"",' * 10_000 + b'""]}'),
    "lists of items that are no tokens": (CompletionRequest, b'{"prompt":[[' + b'"",' * 10_000 + b'""]]}'),
    "lists without items": (CompletionRequest, b'{"prompt":[' + b"[]," * 10_000 + b"[]]}"),
    "biases that are no numbers": (
        CompletionRequest,
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":"x"' % index for index in range(10_000)) + b"}}",
    ),
    "messages that are none": (ChatRequest, b'{"messages":[' + b"{}," * 2000 + b"{}]}"),
    "parts that are none": (ChatRequest, b'{"messages":[{"role":"user","content":[' + b"{}," * 2000 + b"{}]}]}"),
    "stop strings that are none": (CompletionRequest, b'{"prompt":"a","stop":[' + b"1," * 10_000 + b"1]}"),
    "tools that are none": (ChatRequest, b'{"messages":[{"role":"user"}],"tools":[' + b"1," * 5000 + b"1]}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_first_few_mistakes_of_a_body_end_its_check(name: str) -> None:
    from pydantic import ValidationError

    kind, body = WRONG[name]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(body)
    assert caught.value.error_count() <= 8


OBJECT = '{"messages":[{"role":"user"}],"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}'


@pytest.mark.parametrize(
    ("kind", "body", "code"),
    [
        ("chat", OBJECT % ('{"a":' * 900 + "1" + "}" * 900), "bad_json"),
        ("chat", OBJECT % '{"a":"\\ud800"}', "bad_json"),
        ("chat", OBJECT % json.dumps({str(index): [] for index in range(20_000)}), "bad_parameter"),
        ("completion", '{"prompt":"\\udc00"}', "bad_json"),
        ("completion", json.dumps({"prompt": "a"} | {f"x{index}": 1 for index in range(300)}), "bad_parameter"),
        (
            "completion",
            json.dumps({"prompt": "a", "logit_bias": {str(index): 1 for index in range(1025)}}),
            "bad_parameter",
        ),
        ("completion", json.dumps({"prompt": "a", "logit_bias": {"1": True}}), "bad_parameter"),
        ("completion", '{"prompt":"a","logit_bias":{"1":1e999}}', "bad_parameter"),
        ("completion", json.dumps({"prompt": [1] * (2**20 + 1)}), "bad_parameter"),
        ("completion", "", "bad_json"),
        ("completion", "[]", "bad_body"),
    ],
)
def test_what_is_out_of_bounds_is_told_and_is_no_mistake_of_the_server(
    reader: RequestReader, kind: str, body: str, code: str
) -> None:
    problem = outcome(reader, kind, body.encode())
    assert isinstance(problem, Problem)
    assert (problem.status, problem.code) == (400, code), problem
    assert 10 < len(problem.message) < 600


def test_prompts_of_tokens_are_checked_where_they_are_read_and_bounded_in_all(
    reader: RequestReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two million tokens in many prompts: to take them in and look at each held the server for 0.2 s."""
    monkeypatch.setattr(reader, "_hidden", 64)
    monkeypatch.setattr(reader, "_context", 1000)
    too_many = outcome(reader, "embedding", {"input": [[1] * 1000] * 1049})
    assert too_many.message == "The prompts have 1049000 tokens in all; 1048576 are taken at once."
    for kind, wrong in (("embedding", {"input": [[1], [10**6]]}), ("completion", {"prompt": [[1], [10**6]]})):
        assert "vocabulary" in outcome(reader, kind, wrong).message
        assert "context" in outcome(reader, kind, {name: [[1] * 1001] for name in wrong}).message


def test_a_mistake_of_the_server_is_told_as_one_and_its_trace_is_for_the_log(
    reader: RequestReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(reader, "_completion", broken)
    problem = outcome(reader, "completion", {"prompt": "a"})
    assert (problem.status, problem.code) == (500, "internal_error")
    assert "a bug" not in problem.message
    assert "a bug" in problem.trace


class Office:
    """A preparer with its loop."""

    def __init__(self, loop: asyncio.Runner, template: str | None = None) -> None:
        self.loop = loop
        self.real = Preparer()

        async def start() -> None:
            await self.real.start(assignment(template))

        loop.run(start())

    def ask(self, kind: Any, body: object) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            return self.loop.run(self.real.prepare(kind, content, ""))
        except ApiError as error:
            return error

    def process(self) -> psutil.Process:
        return psutil.Process(self.loop.run(self.real._processes._started())[0].pid)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def office(loop: asyncio.Runner) -> Iterator[Office]:
    office = Office(loop)
    yield office
    loop.run(office.real.close())


def test_it_comes_to_the_same_in_a_process_of_its_own(office: Office, reader: RequestReader) -> None:
    assert office.ask("chat", HELLO) == outcome(reader, "chat", HELLO)
    assert office.ask("tokenize", {"prompt": "one two"}) == outcome(reader, "tokenize", {"prompt": "one two"})
    assert office.ask("completion", {}).body["error"]["code"] == "bad_parameter"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [1, None, 0.5]}}}]
    asked = HELLO | {"tools": tools, "tool_choice": "required", "stop": ["x"], "cache_salt": "s", "colour": 1}
    prepared = office.ask("chat", asked)
    assert prepared == outcome(reader, "chat", asked)
    assert prepared.tools[0].parameters == tools[0]["function"]["parameters"]
    assert prepared.unknown == ["colour"]


def test_the_largest_wrong_bodies_cost_their_sender_alone(office: Office) -> None:
    """Each would freeze a server that reads it itself for seconds, and take a gigabyte."""
    before = psutil.Process().memory_info().rss
    for kind, body in (
        ("tokenize", b'{"prompt": "' + b"1 " * (LIMIT // 2 - 10) + b'"}'),
        ("detokenize", b'{"tokens": [' + b'"",' * (LIMIT // 3 - 10) + b'""]}'),
        ("completion", b'{"prompt": [[' + b'"",' * (LIMIT // 3 - 10) + b'""]]}'),
        ("completion", b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d":""' % i for i in range(340_000)) + b"}}"),
    ):
        assert office.ask(kind, body).status_code == 400
    assert psutil.Process().memory_info().rss - before < 128 * 2**20
    assert eventually(lambda: sum(child.memory_full_info().uss for child in office.process().children()) < 512 * 2**20)


def test_small_requests_do_not_wait_for_large_ones(office: Office) -> None:
    """Nor for one that never ends: the process that reads large ones is stopped here."""

    async def beside() -> Prepared:
        large = json.dumps({"prompt": "a" * 2 * QUICK_BYTES}).encode()
        started = await office.real._processes._started()
        await office.real.prepare("tokenize", json.dumps({"prompt": " " * 2 * QUICK_BYTES}).encode(), "")
        worker = psutil.Process(pid_of(started[1][1]._pid_fd))
        worker.suspend()
        stuck = [asyncio.create_task(office.real.prepare("tokenize", large, "greedy")) for _ in range(10)]
        await asyncio.sleep(0)
        answer = await office.real.prepare("chat", json.dumps(HELLO).encode(), "honest")
        assert isinstance(answer, Prepared)
        assert not any(task.done() for task in stuck)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        await asyncio.to_thread(worker.wait, 60)
        assert isinstance(
            await office.real.prepare("tokenize", b" " * 2 * QUICK_BYTES + b'{"prompt":"a"}', ""), TokenizedText
        )
        return answer

    office.loop.run(beside())


@pytest.mark.parametrize("body", [b'{"prompt": "' + b"1 " * 2**21 + b'"}', b'{"tokens": [' + b"1," * 50_000 + b"1]}"])
def test_one_who_leaves_in_the_middle_of_a_message_takes_nobody_elses_along(office: Office, body: bytes) -> None:
    """While the request goes to the process that reads it, while it is read, and while what it comes to comes back."""
    kind: Any = "tokenize" if b"prompt" in body else "detokenize"

    async def leave_and_ask() -> None:
        for turns in range(0, 60, 6):
            leaving = asyncio.create_task(office.real.prepare(kind, body, "greedy"))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            async with asyncio.timeout(60):
                small = b" " * 2 * QUICK_BYTES + b'{"prompt":"a"}'
                assert isinstance(await office.real.prepare("tokenize", small, "honest"), TokenizedText)

    office.loop.run(leave_and_ask())


def test_processes_that_are_killed_are_replaced(office: Office) -> None:
    for child in office.process().children():
        child.kill()
    assert isinstance(office.ask("chat", HELLO), Prepared)
    before = office.process()
    before.kill()
    assert eventually(lambda: office.loop.run(asyncio.sleep(0.01)) or office.real._processes._starting is None)
    assert isinstance(office.ask("chat", HELLO), Prepared)
    assert office.process() != before


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SPITEFUL = (
    "{% if false %}{{ 'x' * 3000000000 }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% if m.content == 'hang' %}" + ENDLESS + "{% endif %}"
    "{% if m.content == 'grow' %}{% set ns = namespace(x='x' * 1000) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{% endif %}{% endfor %}"
)


def test_a_template_without_end_is_found_out_when_the_model_is_loaded(loop: asyncio.Runner) -> None:
    office = Office(loop, ENDLESS)
    try:
        assert office.ask("chat", HELLO).body["error"]["code"] == "bad_chat_template"
        assert isinstance(office.ask("completion", {"prompt": "Hello"}), Prepared)
    finally:
        loop.run(office.real.close())


def test_a_template_that_turns_bad_with_its_input_costs_that_request_alone(loop: asyncio.Runner) -> None:
    """Its three gigabytes in a branch that is not taken cost nothing."""
    office = Office(loop, SPITEFUL)

    def say(text: str) -> Any:
        return office.ask("chat", {"messages": [{"role": "user", "content": text}]})

    try:
        assert isinstance(say("Hello"), Prepared)
        for text in ("hang", "grow"):
            assert say(text).body["error"]["code"] == "request_too_complex"
            assert isinstance(say("Hello"), Prepared)

        async def close_at_work() -> None:
            body = json.dumps({"messages": [{"role": "user", "content": "hang"}]}).encode()
            hanging = asyncio.create_task(office.real.prepare("chat", body, ""))
            await asyncio.sleep(0.1)
            await office.real.close()
            await asyncio.gather(hanging, return_exceptions=True)

        process = office.process()
        children = process.children()
        loop.run(close_at_work())
        assert not psutil.wait_procs([process, *children], timeout=60)[1]
    finally:
        loop.run(office.real.close())
