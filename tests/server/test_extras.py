"""Fields that vLLM, SGLang and others add: honoured, or refused by name; and tools on any model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from phalanx.errors import RequestError
from phalanx.server import markup
from phalanx.server.grammar.rules import RuledMatcher, TokenRules, rules_in
from phalanx.server.parsers import TOOL_PARSERS, OutputParser, ToolSchema
from phalanx.server.refused import REFUSED
from tests.server.scripted import Scripted, scripted

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def place() -> Iterator[Scripted]:
    with scripted(aliases=("small",)) as place:
        yield place


def chat(place: Scripted, line: str = "one two three", **more: Any) -> httpx.Response:
    place.engine.lines.clear()
    place.says(line)
    return httpx.post(place.url + "/v1/chat/completions", json={"messages": HELLO} | more)


def test_a_stop_is_told_and_kept_where_it_is_wanted(place: Scripted) -> None:
    told = chat(place, stop=["x", " two"]).json()["choices"][0]
    assert (told["message"]["content"], told["finish_reason"], told["stop_reason"]) == ("one", "stop", " two")
    kept = chat(place, stop=[" two"], include_stop_str_in_output=True).json()["choices"][0]
    assert kept["message"]["content"] == "one two"
    assert chat(place).json()["choices"][0]["stop_reason"] is None


def test_tokens_are_told_where_they_are_wanted(place: Scripted) -> None:
    body = chat(place, return_token_ids=True).json()
    tokenizer = place.service.tokenizer
    assert tokenizer.decode(body["choices"][0]["token_ids"]) == "one two three"
    assert tokenizer.decode(body["prompt_token_ids"], keep_special=True) == place.last_prompt
    assert "token_ids" not in chat(place).json()["choices"][0]


def test_usage_comes_with_every_chunk_where_it_is_wanted(place: Scripted) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = chat(place, stream=True, stream_options=options).text
    assert text.count('"completion_tokens":') == text.count("data: {")
    assert chat(place, stream_options=options).status_code == 400


def test_an_answer_that_was_begun_is_continued_and_a_prompt_can_do_without_its_end(place: Scripted) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The best"}]
    chat(place, messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert place.last_prompt.endswith("assistant\nThe best")
    chat(place, add_generation_prompt=False)
    assert place.last_prompt.endswith("Hello<|im_end|>\n")
    for more, end in (({}, "<|im_start|>assistant\n"), ({"add_generation_prompt": False}, "<|im_end|>\n")):
        answer = httpx.post(place.url + "/tokenize", json={"messages": HELLO, "return_token_strs": True} | more).json()
        assert place.service.tokenizer.decode(answer["tokens"], keep_special=True).endswith(end)
        assert len(answer["token_strs"]) == answer["count"]


def test_a_prompt_is_cut_from_its_beginning(place: Scripted) -> None:
    chat(place, truncate_prompt_tokens=3)
    assert place.last_prompt.endswith("assistant\n")
    assert "Hello" not in place.last_prompt


def test_every_name_serves_and_is_told(place: Scripted) -> None:
    assert chat(place, model="small").json()["model"] == "small"
    assert chat(place).json()["model"] == "tiny"
    cards = httpx.get(place.url + "/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["tools"]) for card in cards] == [
        ("tiny", "tiny", "words"),
        ("small", "tiny", "words"),
    ]


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"guided_json": {"type": "object"}}, "json_schema"),
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["a"]}, "choice"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "grammar"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"structured_outputs": {"regex": "a"}}, "regex"),
    ],
)
def test_the_form_of_an_answer_has_many_names(place: Scripted, more: Any, kind: str) -> None:
    assert chat(place, **more).status_code == 200
    assert place.grammars.asked[-1].kind == kind
    assert chat(place, **(more | {"response_format": {"type": "json_object"}})).status_code == 400


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ("prompt",)])
def test_what_would_change_the_answer_and_is_not_here_is_refused_by_name(place: Scripted, name: str) -> None:
    answer = chat(place, **{name: "x"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert chat(place, **{name: None}).status_code == 200


def test_an_effort_that_a_model_cannot_make_is_named(place: Scripted) -> None:
    answer = chat(place, reasoning_effort="high")
    assert answer.headers["x-phalanx-warning"] == "unknown fields ignored: reasoning_effort"
    assert chat(place, chat_template_kwargs={"enable_thinking": False}).status_code == 200
    for name in ("colour", "messages", "eos_token", "chat_template"):
        refused = chat(place, chat_template_kwargs={name: "x"})
        assert refused.status_code == 400
        assert repr(name) in refused.json()["error"]["message"]


def test_tools_and_a_form_go_together_and_some_tools_may_be_left_out(place: Scripted) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    answer = chat(place, CALL, tools=[TOOL], response_format=form).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert '"type":"or"' in place.grammars.asked[-1].source
    chat(place, CALL, tools=[TOOL], response_format=form, tool_choice="required")
    assert '"type":"or"' not in place.grammars.asked[-1].source
    other = {"type": "function", "function": {"name": "g"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [other]}}
    chat(place, tools=[TOOL, other], tool_choice=some)
    assert '"name": "g"' in place.last_prompt
    assert '"name": "f"' not in place.last_prompt
    some["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "h"}}]  # type: ignore[index]
    assert "'h'" in chat(place, tools=[TOOL], tool_choice=some).json()["error"]["message"]


@pytest.mark.parametrize("most", range(1, 12))
@pytest.mark.parametrize("stream", [False, True])
def test_a_tag_that_the_limit_cuts_never_shows(place: Scripted, most: int, stream: bool) -> None:
    answer = chat(place, "Hm. " + CALL + "\n" + CALL, tools=[TOOL], max_tokens=most, stream=stream)
    assert "<" not in answer.text.replace("<|", "")
    assert "tool_call>" not in answer.text


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_what_a_cut_text_shows_is_the_beginning_of_what_the_whole_one_does(tools: str) -> None:
    texts = {
        "hermes": CALL,
        "qwen3_xml": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "qwen3_coder": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "llama3_json": '<|python_tag|>{"name": "f", "parameters": {}}',
        "llama4_pythonic": "[f(), f()]",
        "deepseek_v31": "".join(
            (
                markup.DEEPSEEK_CALLS,
                markup.DEEPSEEK_CALL + "f" + markup.DEEPSEEK_SEPARATOR + "{}" + markup.DEEPSEEK_END_CALL,
                markup.DEEPSEEK_END_CALLS,
            )
        ),
    }
    before = "" if tools == "llama4_pythonic" else "Hm. "
    text = before + texts[tools]
    for end in range(len(text)):
        parser = OutputParser(None, tools, [ToolSchema("f", {})])
        said = [parser.feed(text[:end]).content, parser.finish(cut=True).content]
        assert before.startswith("".join(said)), (text[:end], said)


def bits(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def test_rules_hold_whatever_is_said_and_drafts_change_nothing() -> None:
    rules = TokenRules(allowed=[1, 2, 3, 40], banned=[[3], [1, 2], [2, 2, 1]])
    rng = random.Random(0)
    for _ in range(50):
        matcher, said = RuledMatcher(rules, 50, None), []
        for _ in range(12):
            allowed = bits(matcher.mask())
            expected = {
                token
                for token in (1, 2, 3, 40)
                if not any([*said, token][-len(words) :] == words for words in rules.banned)
            }
            assert allowed == expected
            drafts = [rng.choice([1, 2, 3, 40]) for _ in range(4)]
            masks = matcher.masks(drafts)
            walker = RuledMatcher(rules, 50, None)
            for token in said:
                walker.accept(token)
            for mask, draft in itertools.zip_longest(masks, drafts[: len(masks)]):
                assert mask == walker.mask()
                if draft is not None and draft in bits(mask):
                    walker.accept(draft)
            said.append(rng.choice(sorted(allowed)))
            matcher.accept(said[-1])
    with pytest.raises(RequestError, match="leave no token"):
        RuledMatcher(TokenRules([3], [[3]]), 50, None)


def test_rules_reach_the_engine_beside_a_grammar(place: Scripted) -> None:
    given: list[Any] = []
    submit = place.engine.submit
    place.engine.submit = lambda *rest: given.append(rest[5]) or submit(*rest)  # type: ignore[method-assign]
    try:
        chat(place, bad_words=["fish"], allowed_token_ids=[1, 2], regex="a")
        rules, grammar = rules_in(given[0])
        fish = [place.service.tokenizer.encode(word, special_tokens=False) for word in ("fish", " fish")]
        assert (rules.allowed, rules.banned, grammar) == ([1, 2], fish, b"T")
        chat(place)
        assert given[1] is None
    finally:
        del place.engine.submit
    assert chat(place, allowed_token_ids=[10**6]).status_code == 400
