"""The routes in this process, in front of an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from phalanx.engine.hang import Hang
from phalanx.engine.step_plan import TokenLogprobs
from phalanx.errors import EngineDeadError, PhalanxError, RequestError
from phalanx.runtime.config import EngineConfig
from phalanx.server import app
from phalanx.server.access_log import AccessLog
from phalanx.server.app import create_app
from phalanx.server.engine_client import EngineLaunch, RankHealth
from phalanx.server.errors import ApiError
from phalanx.server.grammar.compiler import GrammarCompiler
from phalanx.server.guard import Guard
from phalanx.server.keys import KeyRing
from phalanx.server.messages import Books, Loading, NewToken, Started
from phalanx.server.metrics import Metrics
from phalanx.server.places import Places
from phalanx.server.service import Service
from phalanx.text.tokenizer import Tokenizer
from tests.server.inline import InlinePreparer, default_model

HELLO = [{"role": "user", "content": "Hello"}]
STARTED = Started(vocab=49152, max_model_len=64, max_num_seqs=4, num_blocks=8, block_size=16, stop_tokens=[2])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return default_model()[1]


@pytest.fixture(scope="module", autouse=True)
def _undescribed() -> Iterator[None]:
    """To describe all routes takes longer than to ask them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastAPI, "openapi", lambda app: {"paths": {}})
        patch.setattr(app, "_with_own_errors", lambda schema: schema | {"components": {"schemas": {}}})
        yield


class Engine:
    """Answers every request with " one two", and keeps what it was asked."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.asked: list[Any] = []
        self.started: Started | None = STARTED
        self.loading: Loading | None = None
        self.books: Books | None = None
        self.live = 0
        self.stuck = False
        self.hang: Hang | None = None

    def submit(self, prompt, params, mailbox, choice, salt=None, grammar=None, owner="", adapter=None) -> int:  # type: ignore[no-untyped-def]
        self.asked.append(SimpleNamespace(prompt=prompt, params=params, salt=salt, owner=owner))
        for index, token in enumerate(self.tokens):
            last = "length" if token == self.tokens[-1] else None
            logprobs = None if params.logprobs is None else TokenLogprobs(-float("inf"), [(token, -0.5)])
            mailbox.put(choice, NewToken(index, token, last, 0, 0.0, logprobs))
        return len(self.asked)

    def cancel(self, id: int) -> None: ...

    def ranks(self) -> list[RankHealth]:
        return [RankHealth(0, "here", 7, 0.1, 0.0, self.stuck)]


class Place:
    """A server without a network."""

    def __init__(self, tokenizer: Tokenizer, share_prefixes: bool = False, keys: KeyRing | None = None) -> None:
        self.engine = Engine(tokenizer.encode(" one two", special_tokens=False))
        self.supervisor = SimpleNamespace(
            state="ready",
            client=self.engine,
            admit=self.admit,
            launch=EngineLaunch(EngineConfig(), 10, "none"),
            last_death=None,
            room=100,
        )
        self.admitted: list[int] = []
        supervisor: Any = self.supervisor
        self.metrics = Metrics("tiny", False)
        preparer: Any = InlinePreparer()
        service = Service(
            name="tiny",
            spec=default_model()[0],
            context=8192,
            tokenizer=tokenizer,
            supervisor=supervisor,
            metrics=self.metrics,
            places=Places(supervisor, shared=keys is not None and keys.several),
            preparer=preparer,
            grammars=GrammarCompiler(Path(), vocab=49152, eos_token_ids=[2]),
            reasoning_parser=None,
            tool_parser=None,
            request_timeout_s=5,
            share_prefixes=share_prefixes,
            keys=keys or KeyRing(),
        )
        asyncio.run(preparer.start(service.assignment))
        self.service = service
        self.app: Any = AccessLog(create_app(service))

    def admit(self, choices: int) -> Engine:
        self.admitted.append(choices)
        return self.engine

    def ask(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(call())


@pytest.fixture
def place(tokenizer: Tokenizer) -> Place:
    return Place(tokenizer)


@pytest.mark.parametrize(
    ("state", "status"),
    [("ready", 200), ("starting", 503), ("restarting", 503), ("draining", 503), ("dead", 503)],
)
def test_ready_is_who_takes_requests(place: Place, state: str, status: int) -> None:
    place.supervisor.state = state
    answer = place.ask("GET", "/ready")
    assert (answer.status_code, answer.json()) == (status, {"status": state})
    assert place.ask("GET", "/live").status_code == 200


def test_ready_tells_how_much_is_loaded(place: Place) -> None:
    place.supervisor.state = "starting"
    place.engine.loading = Loading(1, 3)
    assert place.ask("GET", "/ready").json() == {"status": "starting", "loaded": 0.333}


def test_a_rank_that_hangs_takes_no_requests_and_has_a_name(place: Place) -> None:
    place.engine.stuck = True
    assert (place.ask("GET", "/ready").status_code, place.ask("GET", "/ready").json()) == (503, {"status": "stuck"})
    assert "hang" not in place.ask("GET", "/health").json()
    place.engine.hang = Hang([1], "order_lost", "Rank 1 has not begun step 5.", "a stack")
    hang = place.ask("GET", "/health").json()["hang"]
    assert (hang["ranks"], hang["found"], hang["stack"]) == ([1], "Rank 1 has not begun step 5.", "a stack")
    assert "was lost" in hang["fix"]


@pytest.mark.parametrize(
    ("state", "stuck", "status", "told"),
    [
        ("ready", False, 200, "ready"),
        ("draining", False, 200, "draining"),
        ("ready", True, 503, "stuck"),
        ("draining", True, 503, "stuck"),
        ("starting", False, 503, "starting"),
        ("restarting", False, 503, "restarting"),
        ("dead", True, 503, "dead"),
    ],
)
def test_health_is_of_the_engine_and_its_ranks(place: Place, state: str, stuck: bool, status: int, told: str) -> None:
    place.supervisor.state, place.engine.stuck = state, stuck
    answer = place.ask("GET", "/health")
    assert answer.status_code == status
    assert answer.json()["status"] == told
    assert answer.json()["ranks"][0] == {
        "rank": 0,
        "node": "here",
        "step": 7,
        "beat_age_s": 0.1,
        "busy_s": 0.0,
        "stuck": stuck,
    }


def test_health_tells_requests_and_blocks_once_there_are_any(place: Place) -> None:
    place.engine.live = 3
    assert place.ask("GET", "/health").json()["kv_blocks"] == {"total": 8, "free": 8}
    place.engine.books = SimpleNamespace(free_blocks=5)  # type: ignore[assignment]
    body = place.ask("GET", "/health").json()
    assert (body["requests"], body["kv_blocks"]) == (3, {"total": 8, "free": 5})
    place.engine.started = None
    assert "kv_blocks" not in place.ask("GET", "/health").json()


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("DELETE", "/live", 405)])
def test_what_is_not_served_is_told_in_openai_s_shape(place: Place, method: str, path: str, status: int) -> None:
    answer = place.ask(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == f"{method} {path} is not served here."


@pytest.mark.parametrize(
    ("raised", "status", "code", "words"),
    [
        (RequestError("too_long", "It is long.", "Cut it."), 400, "too_long", "It is long. Cut it."),
        (PhalanxError("odd", "It is odd.", "Even it."), 500, "odd", "It is odd. Even it."),
        (EngineDeadError("rank_died", "secret path", "fix"), 500, "rank_died", "log says why"),
        (ApiError(429, "Full.", "queue_full", headers={"retry-after": "1"}), 429, "queue_full", "Full."),
        (KeyError("secret"), 500, "internal_error", "log has the details"),
    ],
)
def test_errors_say_what_a_client_may_know(
    place: Place, monkeypatch: pytest.MonkeyPatch, raised: Exception, status: int, code: str, words: str
) -> None:
    def refuse(self: Service, asked: str | None) -> None:
        raise raised

    monkeypatch.setattr(Service, "check_model", refuse)
    answer = place.ask("GET", "/v1/models/tiny")
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert words in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert answer.headers.get("retry-after") == ("1" if status == 429 else None)


@pytest.mark.parametrize("id", ["mine-1.a_B", "a" * 128])
def test_a_request_id_comes_back(place: Place, id: str) -> None:
    answer = place.ask("POST", "/v1/completions", {"prompt": "a"}, {"x-request-id": id})
    assert answer.headers["x-request-id"] == id


@pytest.mark.parametrize("id", ["", "a b", "a" * 129, "a=1 reason=stop", "{}"])
def test_a_request_id_that_would_not_fit_a_log_line_is_replaced(place: Place, id: str) -> None:
    answer = place.ask("POST", "/v1/completions", {"prompt": "a"}, {"x-request-id": id})
    assert answer.headers["x-request-id"].startswith("req-")
    assert len(answer.headers["x-request-id"]) == 36


def test_unknown_fields_are_named_safely_and_not_without_end(place: Place) -> None:
    body = {"prompt": "a", "x\r\ny: z": 1, "ü": 1} | {f"field_{index:02}": 1 for index in range(20)}
    warning = place.ask("POST", "/v1/completions", body).headers["x-phalanx-warning"]
    assert warning.startswith("unknown fields ignored: x??y:?z, ?, field_00, ")
    assert warning.endswith("field_13 and 6 more")
    assert "x-phalanx-warning" not in place.ask("POST", "/v1/completions", {"prompt": "a"}).headers


@pytest.mark.parametrize("field", ["chat_template", "suffix", "best_of"])
def test_fields_that_would_be_misunderstood_are_refused(place: Place, field: str) -> None:
    answer = place.ask("POST", "/v1/chat/completions", {"messages": HELLO, field: "x"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field} is not accepted.")
    assert place.ask("POST", "/v1/chat/completions", {"messages": HELLO, field: None}).status_code == 200


def test_every_choice_of_every_prompt_counts_when_let_in(place: Place) -> None:
    assert place.ask("POST", "/v1/completions", {"prompt": ["a", "b"], "n": 3}).status_code == 200
    assert place.admitted == [6]
    assert len(place.engine.asked) == 6


def test_sampling_fields_reach_the_engine(place: Place) -> None:
    given = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "seed": 11,
        "min_tokens": 1,
        "max_tokens": 5,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "priority": -2,
    }
    body = {"prompt": "a", "stop": "zzz", "logit_bias": {"5": -100}, "cache_salt": "s"} | given
    assert place.ask("POST", "/v1/completions", body).status_code == 200
    (asked,) = place.engine.asked
    assert {name: getattr(asked.params, name) for name in given} == given
    assert (asked.params.stop, asked.params.logit_bias, asked.salt) == (["zzz"], {5: -100.0}, "s")


def test_defaults_are_openai_s(place: Place) -> None:
    place.ask("POST", "/v1/completions", {"prompt": "a", "temperature": None, "top_p": None, "top_k": -1})
    place.ask("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4})
    place.ask("POST", "/v1/chat/completions", {"messages": HELLO})
    first, second, third = (asked.params for asked in place.engine.asked)
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k, first.logprobs) == (16, 1.0, 1.0, 0, None)
    assert second.max_tokens == 4
    assert third.max_tokens is None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_logprobs_of_chat_are_a_switch_and_a_number(place: Place, asked: dict, expected: int | None) -> None:
    answer = place.ask("POST", "/v1/chat/completions", {"messages": HELLO} | asked)
    assert place.engine.asked[0].params.logprobs == expected
    logprobs = answer.json()["choices"][0]["logprobs"]
    if expected is None:
        assert logprobs is None
    else:
        assert [token["token"] for token in logprobs["content"]] == [" one", " two"]
        assert {token["logprob"] for token in logprobs["content"]} == {-9999.0}
        assert bytes(logprobs["content"][0]["bytes"]) == b" one"


def test_offsets_of_streamed_logprobs_go_on_where_they_were(place: Place) -> None:
    answer = place.ask("POST", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    offsets = {event["choices"][0]["index"]: event["choices"][0]["logprobs"]["text_offset"] for event in events}
    assert offsets == {0: [0, 4], 1: [0, 4]}
    assert events[0]["choices"][0]["logprobs"]["top_logprobs"] == [{" one": -0.5}, {" two": -0.5}]


def test_one_line_of_log_tells_how_a_request_went(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "phalanx.request")
    place.ask("POST", "/v1/completions", {"prompt": [5, 6, 7], "n": 2}, {"x-request-id": "mine"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "phalanx.request"]
    assert re.match(r"mine POST /v1/completions status=200 ms=[\d.]+ prompt=3 cached=0 output=4 ttft_ms=\d", line)
    assert line.endswith("reason=length,length")
    assert "tpot_ms=-" not in line


def test_a_request_that_was_not_let_in_is_logged_but_not_counted(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "phalanx.request")

    def full(choices: int) -> None:
        raise ApiError(429, "Full.", "queue_full", headers={"retry-after": "1"})

    place.supervisor.admit = full
    assert place.ask("POST", "/v1/completions", {"prompt": "a"}).headers["retry-after"] == "1"
    assert "output=0 ttft_ms=- tpot_ms=- reason=queue_full" in caplog.text
    assert b"phalanx:e2e_request_latency_seconds_count{" in place.metrics.expose()
    assert b'seconds_count{engine="0",model_name="tiny"} 1.0' not in place.metrics.expose()


def test_a_prompt_beyond_the_context_or_the_vocabulary_never_reaches_the_engine(place: Place) -> None:
    for prompt in ([5] * 64, [49152]):
        assert place.ask("POST", "/v1/completions", {"prompt": prompt}).status_code == 400
    assert not place.engine.asked


def test_content_in_parts_is_one_text_and_a_developer_a_system(place: Place, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    for role, content in [("system", "Hello"), ("developer", parts)]:
        place.ask("POST", "/v1/chat/completions", {"messages": [{"role": role, "content": content}]})
    first, second = (asked.prompt for asked in place.engine.asked)
    assert first == second
    assert "<|im_start|>system\nHello<|im_end|>" in tokenizer.decode(first, keep_special=True)


def test_echoed_prompts_stand_before_each_of_their_choices(place: Place) -> None:
    body = {"prompt": ["abc", "xyz"], "n": 2, "echo": True}
    choices = place.ask("POST", "/v1/completions", body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["abc one two"] * 2 + ["xyz one two"] * 2
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


def test_what_a_key_leaves_in_the_cache_is_found_by_that_key_alone(place: Place) -> None:
    """Else one could ask, by `cached_tokens` or by the time it takes, whether another has sent a prompt."""

    def salt_of(key: str, **more: str) -> str | None:
        place.ask("POST", "/v1/completions", {"prompt": "a"} | more, {"authorization": f"Bearer {key}"})
        return place.engine.asked[-1].salt

    app, place.app = place.app, Guard(place.app, KeyRing(["one", "two"]), max_body=10_000)  # type: ignore[assignment]
    salts = [salt_of("one"), salt_of("two"), salt_of("one", cache_salt="s"), salt_of("two", cache_salt="s")]
    assert len(set(salts)) == 4
    assert None not in salts
    assert salt_of("one") == salts[0]
    assert salt_of("two", cache_salt=str(salts[0])) not in salts
    assert not any("one" in str(salt) or "two" in str(salt) for salt in salts)
    place.app = app
    assert salt_of("") is None


def test_keys_share_prefixes_where_the_operator_says_so(tokenizer: Tokenizer) -> None:
    place = Place(tokenizer, share_prefixes=True)
    place.app = Guard(place.app, KeyRing(["one", "two"]), max_body=10_000)  # type: ignore[assignment]
    for key in ("one", "two"):
        for salt in (None, "s"):
            place.ask(
                "POST", "/v1/completions", {"prompt": "a", "cache_salt": salt}, {"authorization": f"Bearer {key}"}
            )
            assert place.engine.asked[-1].salt == salt
