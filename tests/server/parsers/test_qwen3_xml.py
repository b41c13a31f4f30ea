"""Qwen3 Coder: XML calls whose values have the types of the tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.server.parsers import ToolSchema

from .outputs import Output, check, deltas_of, parse

SCHEMA = ToolSchema(
    "f",
    {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "x": {"type": "number"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "a": {"type": "array", "items": {"type": "integer"}},
            "z": {"type": "null"},
        },
    },
)


def call(*parameters: tuple[str, str], name: str = "f") -> str:
    """As the chat template writes it."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


OUTPUTS = [
    Output("no call", "It is sunny.\n", content="It is sunny.\n"),
    Output("one call", call(("s", "Paris")), calls=(("f", '{"s": "Paris"}'),)),
    Output("no parameters", call(), calls=(("f", "{}"),)),
    Output(
        "every type",
        call(
            ("s", "1"), ("i", "-7"), ("x", "1.5e3"), ("b", "true"), ("o", '{"k": [1]}'), ("a", "[1, 2]"), ("z", "null")
        ),
        calls=(("f", '{"s": "1", "i": -7, "x": 1.5e3, "b": true, "o": {"k": [1]}, "a": [1, 2], "z": null}'),),
    ),
    Output("Python's words", call(("b", "False"), ("z", "None")), calls=(("f", '{"b": false, "z": null}'),)),
    Output(
        "values of the wrong type are strings",
        call(("i", "seven"), ("x", "1,5"), ("b", "maybe"), ("o", "[1]"), ("a", "[1,"), ("z", "nil"), ("i", "1.5")),
        calls=(("f", '{"i": "seven", "x": "1,5", "b": "maybe", "o": "[1]", "a": "[1,", "z": "nil", "i": "1.5"}'),),
    ),
    Output(
        "numbers JSON does not have are strings",
        call(("x", "NaN"), ("x", "-Infinity"), ("i", "true"), ("x", "0x10"), ("x", "")),
        calls=(("f", '{"x": "NaN", "x": "-Infinity", "i": "true", "x": "0x10", "x": ""}'),),
    ),
    Output("keys the schema does not have are strings", call(("new", "5")), calls=(("f", '{"new": "5"}'),)),
    Output("tools the request does not have take strings", call(("i", "5"), name="g"), calls=(("g", '{"i": "5"}'),)),
    Output(
        "two calls",
        call(("i", "1")) + "\n" + call(("i", "2")),
        calls=(("f", '{"i": 1}'), ("f", '{"i": 2}')),
    ),
    Output(
        "words before, between and after",
        "One.\n" + call() + "\nTwo.\n" + call() + "\nThree.",
        content="One.\nTwo.\nThree.",
        calls=(("f", "{}"), ("f", "{}")),
    ),
    Output(
        "one newline on each side is markup",
        call(("s", "\n  two lines\n\twith space \n"))
        + "<tool_call><function=f><parameter=s>x</parameter></function></tool_call>",
        calls=(("f", r'{"s": "\n  two lines\n\twith space \n"}'), ("f", '{"s": "x"}')),
    ),
    Output(
        "empty values",
        call(("s", ""))
        + "<tool_call><function=f><parameter=s></parameter><parameter=s>\n</parameter></function></tool_call>",
        calls=(("f", '{"s": ""}'), ("f", '{"s": "", "s": ""}')),
    ),
    Output(
        "what JSON must escape",
        call(("s", 'say "hi" \\ \x01 \u2028 🦜'), ('k"ey\\', "v")),
        calls=(("f", '{"s": "say \\"hi\\" \\\\ \\u0001 \u2028 🦜", "k\\"ey\\\\": "v"}'),),
    ),
    Output(
        "letters of the world",
        call(("città", "Zürich 🏔️"), name="wetter_北京"),
        calls=(("wetter_北京", '{"città": "Zürich 🏔️"}'),),
    ),
    Output(
        "other tags inside values",
        call(("s", "<b>a</b> <tool_call> </tool_call> <function=f> <param <parameter </parameters>")),
        calls=(("f", '{"s": "<b>a</b> <tool_call> </tool_call> <function=f> <param <parameter </parameters>"}'),),
    ),
    Output(
        "the end of a parameter is missing",
        "<tool_call>\n<function=f>\n<parameter=s>\nx\n<parameter=i>\n5\n</function>\n</tool_call>",
        calls=(("f", '{"s": "x", "i": 5}'),),
    ),
    Output(
        "the end of the function is missing",
        "<tool_call>\n<function=f>\n<parameter=i>\n5\n</parameter>\n</tool_call>\nDone.",
        content="Done.",
        calls=(("f", '{"i": 5}'),),
    ),
    Output(
        "both ends are missing before the next call",
        "<tool_call><function=f><parameter=i>5</parameter><tool_call><function=f><parameter=i>6</parameter>",
        calls=(("f", '{"i": 5}'), ("f", '{"i": 6}')),
    ),
    Output(
        "the next function in the same call",
        "<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>",
        calls=(("f", "{}"), ("g", "{}")),
    ),
    Output(
        "the next function without the end of the one before",
        "<tool_call>\n<function=f>\n<function=g>\n</function>\n</tool_call>",
        calls=(("f", "{}"), ("g", "{}")),
    ),
    Output("no tag around the function", "Now:\n" + "<function=f>\n</function>", content="Now:", calls=(("f", "{}"),)),
    Output(
        "an end tag around a function without a beginning",
        "<function=f></function></tool_call></tool_call>",
        content="</tool_call>",
        calls=(("f", "{}"),),
    ),
    Output(
        "an end tag too many after a function without an end",
        "<tool_call><function=f></tool_call></tool_call>",
        content="</tool_call>",
        calls=(("f", "{}"),),
    ),
    Output(
        "words between parameters",
        "<tool_call><function=f>first <parameter=i>1</parameter> then <parameter=s>x</parameter></function>",
        content="first  then",
        calls=(("f", '{"i": 1, "s": "x"}'),),
    ),
    Output(
        "a parameter without a name",
        "<tool_call><function=f><parameter=>1</parameter><parameter=i>1</parameter></function></tool_call>",
        content="<parameter=>1</parameter>",
        calls=(("f", '{"i": 1}'),),
    ),
    Output("cut off after the name", "<tool_call>\n<function=f>\n", calls=(("f", "{}"),)),
    Output(
        "cut off between parameters",
        "<tool_call>\n<function=f>\n<parameter=i>\n5\n</parameter>\n<para",
        content="<para",
        calls=(("f", '{"i": 5}'),),
    ),
    Output(
        "cut off in a key",
        "<tool_call>\n<function=f>\n<parameter=i>\n5\n</parameter>\n<parameter=ci",
        content="<parameter=ci",
        calls=(("f", '{"i": 5}'),),
    ),
    Output(
        "cut off before a value",
        "<tool_call>\n<function=f>\n<parameter=s>",
        calls=(("f", '{"s": "'),),
        broken=0,
    ),
    Output(
        "cut off in a string",
        "<tool_call>\n<function=f>\n<parameter=s>\nPar\n</para",
        calls=(("f", r'{"s": "Par\n</para'),),
        broken=0,
    ),
    Output(
        "cut off in a list",
        "<tool_call>\n<function=f>\n<parameter=a>\n[1, 2\n",
        calls=(("f", '{"a": [1, 2\n'),),
        broken=0,
    ),
    Output(
        "cut off in a number",
        "<tool_call>\n<function=f>\n<parameter=i>\n1",
        calls=(("f", '{"i": 1'),),
        broken=0,
    ),
]

NO_CALLS = [
    "if a < b { return <function> }",
    "see <tool_cal",
    "<tool_call>",
    "<tool_call>\n<func",
    "<tool_call>\n<function=f",
    "<function=\n>",
    "<function=>",
    "<function= >",
    "<function=a<b>",
    f"<function={'a' * 257}>",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "<tool_call>oops</tool_call>",
    "</function></tool_call>",
    "<parameter=s>\nx\n</parameter>",
]


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_what_the_model_means(output: Output) -> None:
    check(output, "qwen3_xml", [SCHEMA])


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looks_like_a_call_is_content_to_the_last_character(text: str) -> None:
    check(Output("", text, content=text), "qwen3_xml", [SCHEMA])


def test_names_have_a_limit() -> None:
    name = "a" * 256
    check(Output("", f"<function={name}></function>", calls=((name, "{}"),)), "qwen3_coder", [SCHEMA])
    too_long = f"<function={name}a"
    assert deltas_of([too_long], "qwen3_coder")[0].content == too_long, "nothing is held for a name that is none"


DEFINITIONS = {
    "Size": {"type": "integer"},
    "Either": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "boolean"}]},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "five", "five"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5a", "5a"),
        ({"oneOf": [{"type": "array"}, {"type": "object"}]}, '{"k": "é"}', {"k": "é"}),
        ({"allOf": [{"type": "array"}]}, "[1]", [1]),
        ({"type": ["number", "boolean"]}, "TRUE", True),
        ({"type": ["number", "boolean"]}, " 2.50 ", 2.5),
        ({"type": "number"}, "3", 3),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "array"}, "[" * 10_000, "[" * 10_000),
        ({"$ref": "#/$defs/Size"}, "5", 5),
        ({"$ref": "#/$defs/Either"}, "null", None),
        ({"$ref": "#/$defs/Loop"}, "true", True),
        ({"$ref": "#/$defs/Nowhere/at/all"}, "5", "5"),
        ({"type": "banana"}, "5", "5"),
        ({"type": 5}, "5", "5"),
        ({"type": {"a": 1}}, "5", "5"),
        ({"anyOf": "x"}, "5", "5"),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({}, "5", "5"),
        (True, "5", "5"),
        (None, "5", "5"),
    ],
)
def test_a_value_has_a_type_that_the_schema_allows_or_is_a_string(schema: Any, text: str, value: Any) -> None:
    tool = ToolSchema("f", {"properties": {"k": schema}, "$defs": DEFINITIONS})
    for pieces in ([call(("k", text))], list(call(("k", text)))):
        meaning = parse(pieces, "qwen3_xml", schemas=[tool])
        assert json.loads(meaning.calls[0][1]) == {"k": value}
        assert type(json.loads(meaning.calls[0][1])["k"]) is type(value)


@pytest.mark.parametrize("parameters", [{}, {"properties": None}, {"properties": [1]}, {"type": "object"}])
def test_a_tool_without_a_schema_takes_strings(parameters: dict[str, Any]) -> None:
    meaning = parse([call(("k", "5"))], "qwen3_xml", schemas=[ToolSchema("f", parameters)])
    assert meaning.calls == (("f", '{"k": "5"}'),)


def test_strings_go_out_as_they_come_and_other_values_when_they_are_complete() -> None:
    pieces = [
        "<tool_call>\n<function=f>\n",
        "<parameter=s>\nPar",
        "is\n",
        "</parameter>\n<parameter=i>\n12",
        "3\n</parameter>",
    ]
    arguments = [
        "".join(part.arguments for part in delta.tool_calls) for delta in deltas_of(pieces, "qwen3_xml", [SCHEMA])
    ]
    assert arguments == ["", '{"s": "Par', "is", '", "i": ', "123", "}"]
