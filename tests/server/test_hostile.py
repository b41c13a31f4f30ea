"""Hostile requests get a 4xx with a clear message, and a normal request beside them is served meanwhile."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.running import Server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"
HELLO = [{"role": "user", "content": "hi"}]
TEXT_BLOCK = {"type": "text", "text": "x"}


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


CORPUS: dict[str, tuple[str, object]] = {
    "a billion choices": (COMPLETIONS, {"prompt": "a", "n": 10**9}),
    "no choice": (COMPLETIONS, {"prompt": "a", "n": 0}),
    "true for a number": (COMPLETIONS, {"prompt": "a", "n": True}),
    "a number in quotes": (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}),
    "a megabyte of stop strings": (COMPLETIONS, {"prompt": "a", "stop": ["x" * 1000] * 1000}),
    "an endless stop string": (COMPLETIONS, {"prompt": "a", "stop": "x" * 10**6}),
    "an empty stop string": (COMPLETIONS, {"prompt": "a", "stop": [""]}),
    "not a number": (COMPLETIONS, '{"prompt": "a", "temperature": NaN}'),
    "infinity": (COMPLETIONS, '{"prompt": "a", "top_p": Infinity}'),
    "a number too large for a float": (COMPLETIONS, '{"prompt": "a", "temperature": 1e999}'),
    "a number of five thousand digits": (COMPLETIONS, '{"prompt": "a", "seed": ' + "9" * 5000 + "}"),
    "a huge seed": (COMPLETIONS, {"prompt": "a", "seed": 2**64}),
    "a NUL in text": (COMPLETIONS, {"prompt": "a\x00b"}),
    "a NUL in a message": (CHAT, {"messages": [{"role": "user", "content": "\x00"}]}),
    "raw NUL bytes": (COMPLETIONS, b"\x00\x00\x00"),
    "half a surrogate pair": (COMPLETIONS, '{"prompt": "\\ud800"}'),
    "broken UTF-8": (COMPLETIONS, b'{"prompt": "\xff\xfe"}'),
    "negative token ids": (COMPLETIONS, {"prompt": [-1, -2]}),
    "token ids beyond the vocabulary": (COMPLETIONS, {"prompt": [10**6]}),
    "token ids beyond any integer": (COMPLETIONS, {"prompt": [2**70]}),
    "an empty prompt": (COMPLETIONS, {"prompt": []}),
    "too many prompts": (COMPLETIONS, {"prompt": ["a"] * 1000}),
    "more choices than the queue holds": (COMPLETIONS, {"prompt": ["a"] * 128, "n": 128}),
    "a huge bias list": (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(5000)}}),
    "a bias for no token": (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}),
    "a bias of NaN": (COMPLETIONS, '{"prompt": "a", "logit_bias": {"1": NaN}}'),
    "too many logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 10**6}),
    "log-probabilities of a prompt in a stream": (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}),
    "log-probabilities of many prompts": (COMPLETIONS, {"prompt": [[1] * 400] * 128, "n": 8, "prompt_logprobs": 0}),
    "ten thousand texts to embed": (EMBEDDINGS, {"input": ["a"] * 10_000}),
    "nothing to embed": (EMBEDDINGS, {"input": ""}),
    "a text too long to embed": (EMBEDDINGS, {"input": "a " * 100_000}),
    "tokens to embed that are none": (EMBEDDINGS, {"input": [[10**6]]}),
    "half an embedding": (EMBEDDINGS, {"input": "a", "dimensions": 3}),
    "an adapter without a key": ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"}),
    "no adapter without a key": ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    "an echo in a chat": (CHAT, {"messages": HELLO, "echo": True}),
    "negative max_tokens": (COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
    "too many messages": (CHAT, {"messages": HELLO * 5000}),
    "an unknown role": (CHAT, {"messages": [{"role": "root", "content": "hi"}]}),
    "no messages": (CHAT, {}),
    "a template of the client's own": (CHAT, {"messages": HELLO, "chat_template": "{{ cycler.__init__ }}"}),
    "template switches that are not known": (CHAT, {"messages": HELLO, "chat_template_kwargs": {"x": "y"}}),
    "arguments that are no JSON": (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}], "content": ""}
            ]
        },
    ),
    "too many tools": (
        CHAT,
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}] * 500},
    ),
    "a tool that is not there": (
        CHAT,
        {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    "deeply nested JSON": (COMPLETIONS, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a deeply nested schema": (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": deep(200)}}},
    ),
    "a catastrophic regex": (
        CHAT,
        {"messages": HELLO, "structured_outputs": {"regex": "(((a{1,999}){1,999}){1,999})*"}},
    ),
    "a broken regex": (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "(a"}}),
    "a broken grammar": (CHAT, {"messages": HELLO, "structured_outputs": {"grammar": "root ::= ("}}),
    "two constraints at once": (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "a", "choice": ["b"]}}),
    "a list for a body": (COMPLETIONS, [1, 2]),
    "a text for a body": (COMPLETIONS, '"prompt"'),
    "no body": (COMPLETIONS, b""),
    "half a JSON": (COMPLETIONS, b'{"prompt": "a"'),
    "template switches with structure": (CHAT, {"messages": HELLO, "chat_template_kwargs": {"thinking": {"a": []}}}),
    "more switches than there are": (
        CHAT,
        {"messages": HELLO, "chat_template_kwargs": {f"s{index}": 1 for index in range(100)}},
    ),
    "a million allowed tokens": (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [1] * (2**20 + 1)}),
    "allowed tokens beyond the vocabulary": (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [10**6]}),
    "a thousand bad words": (COMPLETIONS, {"prompt": "a", "bad_words": ["a"] * 1000}),
    "a prompt cut to nothing": (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}),
    "blocks that are none": (
        MESSAGES,
        {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [{}]}]},
    ),
    "too many blocks": (
        MESSAGES,
        {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [TEXT_BLOCK] * 5000}]},
    ),
    "blocks without any text": (
        MESSAGES,
        {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": []}]},
    ),
    "a call with input of endless size": (
        MESSAGES,
        {
            "model": "tiny",
            "max_tokens": 1,
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": [0] * 20_000}}],
                }
            ],
        },
    ),
    "no tokens to count": ("/v1/messages/count_tokens", {"model": "tiny"}),
    "an item of no kind": (RESPONSES, {"input": [{"type": "x" * 100_000}]}),
    "an item that is none": (RESPONSES, {"input": [1]}),
    "too many items": (RESPONSES, {"input": HELLO * 5000}),
    "a damaged seal": (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "phalanx:!"}, *HELLO]}),
    "a response that is not there": (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
    "too much metadata": (RESPONSES, {"input": "a", "metadata": {str(index): "x" for index in range(17)}}),
    "tools of the server's own, by the thousand": (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}] * 5000}),
    "a namespace of endless size": (
        RESPONSES,
        {"input": "a", "tools": [{"type": "namespace", "tools": [{"a": [0] * 20_000}]}]},
    ),
    "an answer in the background": (RESPONSES, {"input": "a", "background": True}),
    "tokens that are none": ("/detokenize", {"tokens": [10**7]}),
    "neither prompt nor messages": ("/tokenize", {}),
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.mark.parametrize("name", CORPUS)
def test_a_hostile_request_is_told_what_is_wrong(client: httpx.Client, name: str) -> None:
    path, body = CORPUS[name]
    content = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 10 < len(error["message"]) < 600
    assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "a/b/c"]
)
def test_another_content_type_is_refused(client: httpx.Client, kind: str) -> None:
    answer = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": kind})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


def test_a_body_larger_than_allowed_is_refused_whether_it_says_so_or_not(client: httpx.Client) -> None:
    large = b'{"prompt": "' + b"a" * 5 * 2**20 + b'"}'
    announced = client.post(COMPLETIONS, content=large, headers={"content-type": "application/json"})
    assert announced.status_code == 413
    pieces = (large[start : start + 65536] for start in range(0, len(large), 65536))
    try:
        streamed = client.post(COMPLETIONS, content=pieces, headers={"content-type": "application/json"})
        assert streamed.status_code == 413
    except httpx.WriteError:
        pass  # the server closed the connection before all of it was sent
    assert client.get("/live").status_code == 200


def test_the_largest_bodies_leave_the_server_as_small_as_it_was(server: Server, client: httpx.Client) -> None:
    """Text of two million words, and lists of which every item is wrong, which once took gigabytes."""

    def most_memory() -> int:
        return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())[1]) * 1024  # type: ignore[index]

    size, before = 4 * 2**20 - 100, most_memory()
    for path, body in (
        ("/tokenize", b'{"prompt": "' + b"1 " * (size // 2) + b'"}'),
        (COMPLETIONS, b'{"prompt": "' + b"1 " * (size // 2) + b'"}'),
        ("/detokenize", b'{"tokens": [' + b'"",' * (size // 3) + b'""]}'),
        (COMPLETIONS, b'{"prompt": [[' + b'"",' * (size // 3) + b'""]]}'),
    ):
        assert client.post(path, content=body, headers={"content-type": "application/json"}).status_code == 400
    assert most_memory() - before < 300 * 2**20


def exchange(server: Server, *parts: bytes) -> bytes:
    """Raw bytes to the server, and its whole answer."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        answer = b""
        try:
            for part in parts:
                connection.sendall(part)
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            pass
        return answer


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ((b"GET /live HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(10_000)) + b"\r\n",), b"431"),
        ((b"GET /live HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",), b"431"),
        ((b"GET /live HTTP/1.1\r\nx: ", *[b"y" * 1000] * 300), b"431"),
        ((b"GET /" + b"y" * 200_000 + b" HTTP/1.1\r\n\r\n",), b"431"),
        ((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",), b"400"),
        ((b"GET /live HTTP/1.1\r\ncontent-length: -5\r\n\r\n",), b"400"),
        ((b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n",), b"4"),
    ],
    ids=[
        "10,000 headers",
        "a long header",
        "an endless header",
        "a long path",
        "TLS",
        "negative length",
        "huge length",
    ],
)
def test_a_head_beyond_its_bounds_is_refused(server: Server, parts: tuple[bytes, ...], status: bytes) -> None:
    answer = exchange(server, *parts)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
    assert b'"error"' in answer


def test_a_normal_request_is_served_beside_hostile_ones(server: Server) -> None:
    """Its tokens keep coming while others are refused by the dozen."""
    stop = threading.Event()

    def attack() -> None:
        with server.client() as client:
            while not stop.is_set():
                for path, body in [CORPUS["deeply nested JSON"], CORPUS["a megabyte of stop strings"]]:
                    content = body if isinstance(body, bytes) else json.dumps(body).encode()
                    client.post(path, content=content, headers={"content-type": "application/json"})

    attackers = [threading.Thread(target=attack) for _ in range(4)]
    for attacker in attackers:
        attacker.start()
    try:
        with server.client() as client:
            answer = client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 64, "temperature": 0})
        assert answer.json()["usage"]["completion_tokens"] == 64
    finally:
        stop.set()
        for attacker in attackers:
            attacker.join()
