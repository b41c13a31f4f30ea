"""Llama 3: JSON calls in plain text, maybe after `<|python_tag|>`."""

from __future__ import annotations

import pytest

from .outputs import Output, check, deltas_of

OUTPUTS = [
    Output("no call", "It is sunny.\n", content="It is sunny.\n"),
    Output(
        "one call",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        calls=(("get_weather", '{"city": "Paris"}'),),
    ),
    Output(
        "arguments by their other name",
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        calls=(("get_weather", '{"city": "Paris"}'),),
    ),
    Output("the tag", '<|python_tag|>{"name": "a", "parameters": {"n": 1}}', calls=(("a", '{"n": 1}'),)),
    Output("space after the tag", '<|python_tag|>\n {"name": "a", "parameters": {}}', calls=(("a", "{}"),)),
    Output(
        "its type first",
        '{"type": "function", "name": "a", "parameters": {"n": 1}}',
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "over several lines",
        '\n{\n    "name": "a",\n    "parameters": {\n        "n": 1\n    }\n}\n',
        calls=(("a", '{\n        "n": 1\n    }'),),
    ),
    Output(
        "several calls",
        '{"name": "a", "parameters": {"n": 1}}; {"name": "b", "parameters": {"n": 2}};{"name": "c", "parameters": {}}',
        calls=(("a", '{"n": 1}'), ("b", '{"n": 2}'), ("c", "{}")),
    ),
    Output(
        "several calls with a tag each",
        '<|python_tag|>{"name": "a", "parameters": {}} ; <|python_tag|>{"name": "b", "parameters": {}};',
        calls=(("a", "{}"), ("b", "{}")),
    ),
    Output(
        "several calls on lines of their own",
        '{"name": "a", "parameters": {}}\n{"name": "b", "parameters": {}}',
        calls=(("a", "{}"), ("b", "{}")),
    ),
    Output(
        "words around",
        'Here it is: {"name": "a", "parameters": {}} Shall I?',
        content="Here it is: Shall I?",
        calls=(("a", "{}"),),
    ),
    Output(
        "words before the tag",
        'I will look.<|python_tag|>{"name": "a", "parameters": {}}',
        content="I will look.",
        calls=(("a", "{}"),),
    ),
    Output(
        "one semicolon separates, the next is content",
        '{"name": "a", "parameters": {}};; b',
        content="; b",
        calls=(("a", "{}"),),
    ),
    Output("parameters first", '{"parameters": {"n": 1}, "name": "a"}', calls=(("a", '{"n": 1}'),)),
    Output("parameters null", '{"name": "a", "parameters": null}', calls=(("a", "{}"),)),
    Output(
        "letters of the world and escapes",
        r'{"name": "wetter_北京", "parameters": {"città": "\"Zürich\" 🏔️ \\ \u00e9"}}',
        calls=(("wetter_北京", r'{"città": "\"Zürich\" 🏔️ \\ \u00e9"}'),),
    ),
    Output(
        "nested values",
        '{"name": "a", "parameters": {"x": {"y": [{"z": {}}, []]}, "t": true}}',
        calls=(("a", '{"x": {"y": [{"z": {}}, []]}, "t": true}'),),
    ),
    Output(
        "tags and brackets inside strings",
        '{"name": "a", "parameters": {"t": "<|python_tag|>{\\"name\\": }]"}}',
        calls=(("a", '{"t": "<|python_tag|>{\\"name\\": }]"}'),),
    ),
    Output(
        "cut off in the arguments",
        '{"name": "a", "parameters": {"city": "Pa',
        calls=(("a", '{"city": "Pa'),),
        broken=0,
    ),
    Output(
        "the last bracket is missing",
        '{"name": "a", "parameters": {"n": 1}',
        calls=(("a", '{"n": 1}'),),
    ),
    Output(
        "another object, then a call",
        '{"answer": 1}\n{"name": "a", "parameters": {}}',
        content='{"answer": 1}',
        calls=(("a", "{}"),),
    ),
    Output(
        "code, then a call",
        'int f() { return "}"; } {"name": "a", "parameters": {}}',
        content='int f() { return "}"; }',
        calls=(("a", "{}"),),
    ),
    Output(
        "a bracket in the words, then a call",
        'Open with { and go. {"name": "a", "parameters": {}}',
        content="Open with { and go.",
        calls=(("a", "{}"),),
    ),
    Output(
        "an object a tag breaks off, then a call",
        '{"x": <|python_tag|>{"name": "a", "parameters": {}}',
        content='{"x":',
        calls=(("a", "{}"),),
    ),
    Output(
        "an object with a name, then a call",
        '{"name": "Bob", "age": 3} {"name": "a", "parameters": {}}',
        content='{"name": "Bob", "age": 3}',
        calls=(("a", "{}"),),
    ),
]

NO_CALLS = [
    "if a < b { return }",
    "{",
    "{}",
    " { } ",
    '{"',
    '{"na',
    '{"name"',
    '{"name": "a", "para',
    '{"name": "a", "parameters": [1]}',
    '{"name": "a", "parameters": "x"}',
    '{"name": "Bob", "age": 3}',
    '{"name": "Bob"}; {"name": "Eve"}',
    '{"name": {"first": "Bob"}, "parameters": {}}',
    '{"name": 3, "parameters": {}}',
    '{"names": ["a"], "parameters": {}}',
    '{"answer": {"name": "a", "parameters": {}}}',
    '{"answer": [{"name": "a", "parameters": {}}], "x": "}',
    '{"type": "function", "function": {"name": "a", "parameters": {}}}',
    '{"name": "a", "parameters" {}}',
    "<|python_tag|>",
    "<|python_tag|>print(1)",
    "<|python_tag|> {1: 2}",
    "see <|python_ta",
    "; a; b;",
]


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_what_the_model_means(output: Output) -> None:
    check(output, "llama3_json")


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looks_like_a_call_is_content_to_the_last_character(text: str) -> None:
    check(Output("", text, content=text), "llama3_json")


def test_arguments_go_out_as_they_come() -> None:
    deltas = deltas_of(['{"name": "a", "parameters": {"city"', ': "Pa', 'ris"}}'], "llama3_json")
    assert [[call.arguments for call in delta.tool_calls] for delta in deltas] == [
        ['{"city"'],
        [': "Pa'],
        ['ris"}'],
        [],
    ]


def test_a_json_answer_is_not_held_back() -> None:
    deltas = deltas_of(['{"answ', 'er": {"name": ', '"a", "parameters"', ": {}}"], "llama3_json")
    assert [delta.content for delta in deltas] == ['{"answ', 'er": {"name":', ' "a", "parameters"', ": {}}", ""]
