"""Calls that the model has to make come in its own format, and its arguments are those of the tool."""
# ruff: noqa: RUF001 - the tags of DeepSeek are written with a wide bar

from __future__ import annotations

import ast
import itertools
import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from phalanx.errors import RequestError
from phalanx.server.grammar.constraint import Constraint, after_thinking, to_xgrammar
from phalanx.server.grammar.matcher import Grammars
from phalanx.server.grammar.tools import TOOL_FORMATS, tools_constraint
from tests.byte_model import allowed_tokens

from .conftest import Texts

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F", 'k"\n']},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}},
            "required": ["x"],
        },
        "tags": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}},
    "properties": {"n": {"$ref": "#/$defs/n"}},
}
TOOLS = [
    {"name": "get_weather", "parameters": WEATHER},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
    {"name": "grow", "parameters": TREE},
    {"name": "anything", "parameters": None},
]
SCHEMAS = {tool["name"]: tool["parameters"] or {"type": "object"} for tool in TOOLS}
Calls = list[tuple[str, dict[str, Any]]]


def read_hermes(text: str) -> Calls:
    blocks = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
    assert blocks
    calls = [json.loads(block) for block in re.split(r"\n</tool_call>\n<tool_call>\n", blocks[1])]
    return [(call["name"], call["arguments"]) for call in calls]


def read_qwen3_xml(text: str) -> Calls:
    calls = []
    for call in re.split(r"(?<=</tool_call>)\n(?=<tool_call>)", text):
        whole = re.fullmatch(r"<tool_call>\n<function=(\w+)>\n(.*)</function>\n</tool_call>", call, re.DOTALL)
        assert whole
        parameters = re.findall(r"<parameter=(\w+)>(.*?)</parameter>", whole[2], re.DOTALL)
        schema = SCHEMAS[whole[1]].get("properties", {})
        assert not re.sub(r"<parameter=(\w+)>(.*?)</parameter>", "", whole[2], flags=re.DOTALL).strip()
        raw = {name for name, its in schema.items() if its.get("type") == "string" or "enum" in its}
        is_free = whole[1] == "anything"
        calls.append(
            (whole[1], {name: value if name in raw or is_free else json.loads(value) for name, value in parameters})
        )
    return calls


def read_llama3_json(text: str) -> Calls:
    decoder, calls = json.JSONDecoder(), []
    while text:
        call, end = decoder.raw_decode(text)
        calls.append((call["name"], call["parameters"]))
        assert end == len(text) or text[end:].startswith("; ")
        text = text[end + 2 :]
    return calls


def read_pythonic(text: str) -> Calls:
    calls = []
    listed = ast.parse(text, mode="eval").body
    assert isinstance(listed, ast.List)
    for call in listed.elts:
        assert isinstance(call, ast.Call)
        assert not call.args
        calls.append((ast.unparse(call.func), {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}))
    return calls


def read_deepseek(text: str) -> Calls:
    inner = re.fullmatch(r"<｜tool▁calls▁begin｜>(.*)<｜tool▁calls▁end｜>", text, re.DOTALL)
    assert inner
    found = re.findall(r"<｜tool▁call▁begin｜>(\w+)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", inner[1], re.DOTALL)
    return [(name, json.loads(arguments)) for name, arguments in found]


READERS = {
    "hermes": read_hermes,
    "qwen3_xml": read_qwen3_xml,
    "llama3_json": read_llama3_json,
    "llama4_pythonic": read_pythonic,
    "deepseek_v31": read_deepseek,
}


def check(calls: Calls, tool_format: str) -> None:
    for name, arguments in calls:
        schema = json.loads(json.dumps(SCHEMAS[name]))
        if tool_format == "llama4_pythonic" and name == "get_weather":
            schema["properties"]["days"] = {"type": "integer"}
        if tool_format == "qwen3_xml" and name == "get_weather":
            schema["properties"]["unit"] = {"type": "string", "pattern": '^\\s*(C|F|k"\n)\\s*$'}
        Draft202012Validator(schema).validate(arguments)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_required_call_is_one_of_the_tools_or_several(tool_format: str, texts: Texts) -> None:
    found = [
        READERS[tool_format](text)
        for text in texts(tools_constraint(TOOLS, "required", tool_format), count=60, has_free_text=True)
    ]
    for calls in found:
        check(calls, tool_format)
    assert {name for calls in found for name, _ in calls} == set(SCHEMAS)
    assert min(map(len, found)) == 1


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_several_calls_are_possible_unless_they_are_not_wanted(tool_format: str, texts: Texts) -> None:
    """Of a tool without parameters, so that calls are short and often followed by another."""
    now = [TOOLS[1]]
    several = [READERS[tool_format](text) for text in texts(tools_constraint(now, "required", tool_format), count=60)]
    assert max(map(len, several)) > 1
    alone = [
        READERS[tool_format](text) for text in texts(tools_constraint(now, "required", tool_format, parallel=False))
    ]
    assert {len(calls) for calls in alone} == {1}


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@pytest.mark.parametrize("name", ["get_weather", "now"])
def test_a_named_tool_is_called_once(tool_format: str, name: str, texts: Texts) -> None:
    for text in texts(tools_constraint(TOOLS, name, tool_format), has_free_text=True):
        calls = READERS[tool_format](text)
        assert [called for called, _ in calls] == [name]
        check(calls, tool_format)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_model_may_think_before_it_calls(tool_format: str, texts: Texts) -> None:
    for text in texts(after_thinking(tools_constraint(TOOLS, "now", tool_format)), count=10, has_free_text=True):
        _, _, call = text.partition("</think>")
        assert READERS[tool_format](call.lstrip("\n")) == [("now", {})]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_what_cannot_be_enforced_of_a_tool_is_a_hint(tool_format: str, texts: Texts) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "(?=x)", "maxLength": 10_000},
            "b": {"not": {}, "nullable": 1},
        },
        "required": ["a", 7],
        "oneOf": [{"required": ["a"]}, {}],
        "dependentRequired": {"a": ["b"]},
        "$schema": "http://example.org/",
    }
    constraint = tools_constraint([{"name": "anything", "parameters": parameters}], "required", tool_format)
    for text in texts(constraint, count=10, has_free_text=True):
        assert all("a" in arguments for _, arguments in READERS[tool_format](text))


def test_the_names_and_types_of_python_calls_are_enforced() -> None:
    grammar = json.loads(to_xgrammar(tools_constraint(TOOLS, "get_weather", "llama4_pythonic")))
    text = grammar["format"]["elements"][0]["grammar"]
    assert '"city="' in text
    assert '\\"C\\"' in text
    assert '"days=" integer' in text


def test_every_type_is_written_as_python_writes_it(texts: Texts) -> None:
    kinds = ["string", "integer", "number", "boolean", "null", "array", "object"]
    parts: dict[str, Any] = {f"a_{kind}": {"type": kind} for kind in kinds}
    parts |= {"some": {"enum": ["a", None, True, 1.5, [{"k": False}]]}, "pairs": {"prefixItems": [{"type": "integer"}]}}
    nested = {"type": "object", "properties": dict(parts), "required": list(parts)}
    schema = {"type": "object", "properties": {"maybe": {"type": "boolean"}} | parts, "required": [*parts, "nested"]}
    schema["properties"]["nested"] = nested
    found = [
        read_pythonic(text)
        for text in texts(tools_constraint([{"name": "f", "parameters": schema}], "f", "llama4_pythonic"))
    ]
    hints = {**schema, "properties": {**schema["properties"], "pairs": {"type": "array"}}}
    hints["properties"]["nested"] = {**nested, "properties": {**parts, "pairs": {"type": "array"}}}
    for ((_, arguments),) in found:
        Draft202012Validator(hints).validate(arguments)
    assert {"maybe" in arguments for ((_, arguments),) in found} == {True, False}


def accepts(grammars: Grammars, constraint: Constraint, text: str) -> bool:
    """Byte by byte."""
    matcher = grammars.matcher(grammars.pack(to_xgrammar(constraint)))
    for byte in text.encode():
        if byte not in allowed_tokens(matcher.mask()):
            return False
        matcher.accept(byte)
    return matcher.finished


def test_parameters_that_are_not_required_may_be_left_out_but_keep_their_order(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}, "c": {"enum": [3]}}}
    call = tools_constraint([{"name": "f", "parameters": schema}], "f", "llama4_pythonic")
    for size in range(4):
        for chosen in itertools.combinations(["a=1", "b=2", "c=3"], size):
            assert accepts(grammars, call, f"[f({', '.join(chosen)})]")
    for wrong in (
        "[f(, b=2)]",
        "[f(b=2, a=1)]",
        "[f(a=1 b=2)]",
        "[f(a=1,)]",
        "[f(a=1, a=1)]",
        "[f()",
        "[f(d=1)]",
        "[]",
    ):
        assert not accepts(grammars, call, wrong)


@pytest.mark.parametrize(
    ("tool", "choice", "tool_format", "code"),
    [
        ({"name": "f"}, "g", "hermes", "unknown_tool"),
        ({"name": "f>"}, "required", "hermes", "bad_tool"),
        ({"name": 'f", "x": "'}, "required", "llama3_json", "bad_tool"),
        ({"name": 7}, "required", "hermes", "bad_tool"),
        ({"name": "f"}, "f", "morse", "unknown_tool_format"),
        ({"name": "f-g"}, "f-g", "llama4_pythonic", "bad_tool"),
        ({"name": "f.if"}, "required", "llama4_pythonic", "bad_tool"),
        ({"name": "f", "parameters": {"properties": {"a-b": {}}}}, "f", "llama4_pythonic", "bad_tool"),
    ],
)
def test_what_cannot_be_called_is_refused(tool: dict[str, Any], choice: str, tool_format: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_xgrammar(tools_constraint([tool], choice, tool_format))
    assert caught.value.code == code


def test_names_with_dots_are_names_in_python_too(texts: Texts) -> None:
    for text in texts(tools_constraint([{"name": "db.find", "parameters": WEATHER}], "required", "llama4_pythonic")):
        assert {name for name, _ in read_pythonic(text)} == {"db.find"}


def test_a_call_is_a_constraint_like_others() -> None:
    assert tools_constraint(TOOLS, "now", "hermes") == tools_constraint(TOOLS, "now", "hermes")
    assert isinstance(hash(tools_constraint(TOOLS, "now", "hermes")), int)
    assert tools_constraint(TOOLS, "now", "hermes").kind == Constraint("structural_tag").kind
