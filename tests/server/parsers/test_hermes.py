"""Hermes: JSON calls between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

import pytest

from .outputs import Output, check, deltas_of

OUTPUTS = [
    Output("no call", "It is sunny in Paris.\n", content="It is sunny in Paris.\n"),
    Output("nothing", ""),
    Output("only space", " \n ", content=" \n "),
    Output("space before words", "\n  Sunny.", content="\n  Sunny."),
    Output(
        "one call",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        calls=(("get_weather", '{"city": "Paris"}'),),
    ),
    Output(
        "one call without a space",
        '<tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call>',
        calls=(("get_weather", '{"city":"Paris"}'),),
    ),
    Output(
        "two calls",
        '<tool_call>\n{"name": "a", "arguments": {"n": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {"n": 2}}\n</tool_call>\n',
        calls=(("a", '{"n": 1}'), ("b", '{"n": 2}')),
    ),
    Output(
        "words before",
        'Let me look.\n\n<tool_call>{"name": "a", "arguments": {"n": 1}}</tool_call>',
        content="Let me look.",
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "words before, between and after",
        'One.\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\nTwo.\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>\nThree.\n',
        content="One.\nTwo.\nThree.",
        calls=(("a", "{}"), ("b", "{}")),
    ),
    Output(
        "words right at the tags",
        'Now<tool_call>{"name": "a", "arguments": {}}</tool_call> done',
        content="Now done",
        calls=(("a", "{}"),),
    ),
    Output(
        "space before the call is no content",
        ' \n\t<tool_call>{"name": "a", "arguments": {}}</tool_call>',
        calls=(("a", "{}"),),
    ),
    Output(
        "letters of the world",
        '<tool_call>{"name": "wetter_北京", "arguments": {"città": "Zürich 🏔️", "👋🏽": "שלום"}}</tool_call>',
        calls=(("wetter_北京", '{"città": "Zürich 🏔️", "👋🏽": "שלום"}'),),
    ),
    Output(
        "escapes stay as written",
        r'<tool_call>{"name": "a", "arguments": {"t": "\"q\" \\ \/ \n \u00e9 \ud83d\ude00 \\\""}}</tool_call>',
        calls=(("a", r'{"t": "\"q\" \\ \/ \n \u00e9 \ud83d\ude00 \\\""}'),),
    ),
    Output(
        "an escaped name",
        r'<tool_call>{"name": "caf\u00e9", "arguments": {}}</tool_call>',
        calls=(("café", "{}"),),
    ),
    Output(
        "nested values",
        '<tool_call>{"name": "a", "arguments": {"x": {"y": [{"z": {}}, [[1.5e-3]]]}, "n": null}}</tool_call>',
        calls=(("a", '{"x": {"y": [{"z": {}}, [[1.5e-3]]]}, "n": null}'),),
    ),
    Output("no arguments", '<tool_call>{"name": "now"}</tool_call>', calls=(("now", "{}"),)),
    Output("arguments null", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=(("now", "{}"),)),
    Output(
        "arguments called parameters",
        '<tool_call>{"name": "a", "parameters": {"n": 1}}</tool_call>',
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "arguments before the name",
        '<tool_call>{"arguments": {"n":1,"t":"é"}, "name": "a"}</tool_call>',
        calls=(("a", '{"n": 1, "t": "é"}'),),
    ),
    Output(
        "half a character in arguments before the name",
        r'<tool_call>{"arguments": {"t": "\ud800"}, "name": "a"}</tool_call>',
        calls=(("a", r'{"t": "\ud800"}'),),
    ),
    Output(
        "arguments as JSON text in a string",
        r'<tool_call>{"name": "a", "arguments": "{\"n\": 1}"}</tool_call>',
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "more members after and before the arguments",
        '<tool_call>{"id": 7, "name": "a", "arguments": {"n": 1}, "why": {"x": "}"}, "t": 1}</tool_call>',
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "another object before the arguments",
        '<tool_call>{"meta": {"x": 1}, "name": "a", "arguments": {"n": 1}}</tool_call>',
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "another object between the name and the arguments",
        '<tool_call>{"name": "a", "meta": {"x": 1}, "arguments": {"n": 1}}</tool_call>',
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "tags and brackets inside strings",
        '<tool_call>{"name": "a", "arguments": {"t": "</tool_call> <tool_call>{ ]} <"}}</tool_call>',
        calls=(("a", '{"t": "</tool_call> <tool_call>{ ]} <"}'),),
    ),
    Output(
        "the last end tag is missing",
        '<tool_call>{"name": "a", "arguments": {"n": 1}}\n',
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "the first end tag is missing",
        '<tool_call>{"name": "a", "arguments": {}}\n<tool_call>{"name": "b", "arguments": {}}</tool_call>',
        calls=(("a", "{}"), ("b", "{}")),
    ),
    Output(
        "the last bracket is missing",
        '<tool_call>{"name": "a", "arguments": {"n": 1}</tool_call>\nDone.',
        content="Done.",
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "one bracket too many",
        '<tool_call>{"name": "a", "arguments": {"n": 1}}}</tool_call>',
        content="}",
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "cut off in the arguments",
        'Look:\n<tool_call>\n{"name": "a", "arguments": {"city": "Pa',
        content="Look:",
        calls=(("a", '{"city": "Pa'),),
        broken=0,
    ),
    Output(
        "cut off in an escape",
        '<tool_call>{"name": "a", "arguments": {"city": "\\',
        calls=(("a", '{"city": "\\'),),
        broken=0,
    ),
    Output(
        "both last brackets are missing",
        '<tool_call>{"name": "a", "arguments": {"n": 1</tool_call> Done.',
        content="Done.",
        calls=(("a", '{"n": 1'),),
        broken=0,
    ),
    Output(
        "cut off after the arguments",
        '<tool_call>{"name": "a", "arguments": {"n": 1}, "why',
        content=', "why',
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "Python instead of JSON in the arguments",
        '<tool_call>{"name": "a", "arguments": {\'n\': None}}</tool_call>',
        calls=(("a", "{'n': None}"),),
        broken=0,
    ),
    Output(
        "an unopened end tag after the call's own",
        '<tool_call>{"name": "a", "arguments": {}}</tool_call></tool_call>',
        content="</tool_call>",
        calls=(("a", "{}"),),
    ),
    Output(
        "a tag without a call, then a call",
        '<tool_call>oops</tool_call>\n<tool_call>{"name": "a", "arguments": {}}</tool_call>',
        content="<tool_call>oops</tool_call>",
        calls=(("a", "{}"),),
    ),
    Output(
        "a call without end tag, then a tag without a call",
        '<tool_call>{"name": "a", "arguments": {}}<tool_call>oops</tool_call>',
        content="<tool_call>oops</tool_call>",
        calls=(("a", "{}"),),
    ),
    Output(
        "the tag twice",
        '<tool_call>\n<tool_call>{"name": "a", "arguments": {}}</tool_call>',
        content="<tool_call>",
        calls=(("a", "{}"),),
    ),
    Output(
        "a broken object, then a call",
        '<tool_call>{"name": <tool_call>{"name": "a", "arguments": {}}</tool_call>',
        content='<tool_call>{"name":',
        calls=(("a", "{}"),),
    ),
]

NO_CALLS = [
    "if a < b { return <tool> }",
    "<<<tool_call",
    "see <tool_cal",
    "a </tool_call> b",
    "<tool_call>",
    "<tool_call>\n\n",
    "<tool_call> is the tag, </tool_call> ends it.",
    "<tool_call>{}</tool_call>",
    "<tool_call>{]</tool_call>",
    "<tool_call>[]</tool_call>",
    '<tool_call>[{"name": "a", "arguments": {}}]</tool_call>',
    '<tool_call>{name: "a", arguments: {}}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": null, "arguments": {"n": 1}} </tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "a", "arguments": "n=1"}</tool_call>',
    '<tool_call>{"name": "a", "arguments": "[1]"}</tool_call>',
    '<tool_call>{"arguments": {"n": NaN}, "name": "a"}</tool_call>',
    '<tool_call>{"arguments": {"n": 1e999}, "name": "a"}</tool_call>',
    '<tool_call>{"function": {"name": "a", "arguments": {}}}</tool_call>',
    '<tool_call>\n{"name": "a", "argu',
    '<tool_call>{"name": "a", "arguments": ',
    '<tool_call>{"name": "a',
    '<tool_call>{"arguments": {"n": 1}, "name": "a"',
    '\n<tool_call>{"name": "a" "arguments": {}}</tool_call>\n',
]


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_what_the_model_means(output: Output) -> None:
    check(output, "hermes")


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looks_like_a_call_is_content_to_the_last_character(text: str) -> None:
    check(Output("", text, content=text), "hermes")


def test_arguments_go_out_as_they_come() -> None:
    pieces = [
        "Look:",
        '\n<tool_call>\n{"name": "get_weather", "argu',
        'ments": {"city": "Pa',
        'ris"}',
        "}\n</tool",
        "_call>",
    ]
    look, opening, beginning, rest, *ends = deltas_of(pieces, "hermes")
    assert look.content == "Look:"
    assert not opening
    assert [(call.id, call.name, call.arguments) for call in beginning.tool_calls] == [
        ("call_0", "get_weather", '{"city": "Pa')
    ]
    assert [(call.id, call.name, call.arguments) for call in rest.tool_calls] == [(None, None, 'ris"}')]
    assert not any(ends)


def test_only_what_may_begin_a_tag_is_held_back() -> None:
    contents = [delta.content for delta in deltas_of(["1 <", " 2 <too", "th>", "<tool_call", "s>"], "hermes")]
    assert contents == ["1", " < 2", " <tooth>", "", "<tool_calls>", ""]
