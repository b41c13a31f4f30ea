"""What a client may ask of an answer's form."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from phalanx.errors import RequestError
from phalanx.server.grammar.constraint import MOST_BYTES, Constraint, after_thinking, to_xgrammar

from .conftest import Texts


def tag(**content: Any) -> Constraint:
    return Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": content}))


def test_any_json_object(texts: Texts) -> None:
    answers = [json.loads(text) for text in texts(Constraint("json_object"))]
    assert all(isinstance(answer, dict) for answer in answers)
    assert any(answers)


def test_a_choice(texts: Texts) -> None:
    choices = ["yes", "yes, but", 'a "quoted"\nword', "日本"]
    assert set(texts(Constraint("choice", json.dumps(choices)), count=200)) == set(choices)


def test_a_choice_of_nothing_to_say(texts: Texts) -> None:
    assert set(texts(Constraint("choice", '["", "a"]'))) == {"", "a"}


def test_a_grammar(texts: Texts) -> None:
    for text in texts(Constraint("grammar", 'root ::= "(" root ")" | [0-9]+')):
        assert re.fullmatch(r"\(*\d+\)*", text)
        assert text.count("(") == text.count(")")


def test_a_structural_tag_has_its_schemas_and_patterns_checked(texts: Texts) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}
    whole = tag(
        type="sequence",
        elements=[
            {"type": "regex", "pattern": "a.(x[0-9]+)?:"},
            {"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}]},
        ],
    )
    for text in texts(whole):
        head, _, body = text.partition(":{")
        assert re.fullmatch("a.(x[0-9]+)?", head)
        assert len(json.loads("{" + body)["a"]) <= 3
    for wrong in ({"type": "regex", "pattern": r"\bword"}, {"type": "json_schema", "json_schema": {"not": {}}}):
        with pytest.raises(RequestError) as caught:
            to_xgrammar(tag(type="tag", begin="<", content={"type": "star", "content": wrong}, end=">"))
        assert caught.value.code.startswith("unsupported")


def test_the_raw_text_of_xml_is_not_bound_by_rules_for_json_strings() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    for content in ({"type": "json_schema", "style": "qwen_xml"}, {"type": "qwen_xml_parameter"}):
        with pytest.raises(RequestError, match="'maxLength' cannot be enforced"):
            to_xgrammar(tag(json_schema=schema, **content))
        nested = {"type": "object", "properties": {"o": schema}}
        to_xgrammar(tag(json_schema=nested, **content))


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "regex", "grammar", "choice", "structural_tag"])
def test_thinking_comes_first_and_is_free(kind: Any, texts: Texts) -> None:
    source = {
        "json_object": "",
        "json_schema": '{"type": "object"}',
        "regex": r"\{ ?\}",
        "grammar": 'root ::= "{}"',
        "choice": '["{}"]',
        "structural_tag": '{"format": {"type": "const_string", "value": "{}"}}',
    }[kind]
    found = texts(after_thinking(Constraint(kind, source)), has_free_text=True)
    assert any("</think>\n\n{" in text for text in found)
    for text in found:
        thoughts, _, answer = text.partition("</think>")
        assert re.fullmatch(r"\n{0,2}\{.*\}", answer, re.DOTALL)
        assert isinstance(json.loads(answer), dict)
        assert thoughts or text.startswith("</think>")


def test_thinking_keeps_tolerance() -> None:
    schema = '{"type": "array", "uniqueItems": true}'
    to_xgrammar(after_thinking(Constraint("json_schema", schema, tolerant=True)))
    with pytest.raises(RequestError, match="uniqueItems"):
        to_xgrammar(after_thinking(Constraint("json_schema", schema)))


@pytest.mark.parametrize(
    ("kind", "source", "code"),
    [
        ("json_schema", "{", "bad_json"),
        ("json_schema", "[" * 30_000, "bad_json"),
        ("json_schema", "NaN", "bad_json"),
        ("choice", "[]", "bad_grammar"),
        ("choice", '"yes"', "bad_grammar"),
        ("choice", '["yes", 1]', "bad_grammar"),
        ("structural_tag", "{}", "bad_grammar"),
        ("structural_tag", '{"format": [1]}', "bad_grammar"),
        ("structural_tag", '{"format": {"type": "pythonic_calls"}}', "bad_grammar"),
        ("structural_tag", '{"format": {"type": "json_schema"}}', "unsupported_schema"),
        ("structural_tag", '{"format": {"type": "json_schema", "json_schema": {}, "any_order": true}}', "bad_grammar"),
        ("structural_tag", '{"format": ' + '{"type": "star", "content": ' * 90 + "{}" + "}" * 91, "grammar_too_large"),
    ],
)
def test_what_is_no_constraint_is_refused(kind: Any, source: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_xgrammar(Constraint(kind, source))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("grammar", 'root ::= "a', "EBNF lexer error"),
        ("grammar", 'rule ::= "a"', 'The root rule with name "root" is not found'),
        ("structural_tag", '{"format": {"type": "nonsense"}}', "Format type not recognized: nonsense"),
    ],
)
def test_what_xgrammar_refuses_is_refused_with_its_reason(kind: Any, source: str, says: str, texts: Texts) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        texts(Constraint(kind, source))
    assert caught.value.code == "bad_grammar"
    assert "/cpp/" not in caught.value.found


def test_size_is_limited() -> None:
    Constraint("regex", "é" * (MOST_BYTES // 2)).check_size()
    for too_large in (
        Constraint("regex", "é" * (MOST_BYTES // 2) + "x"),
        Constraint("grammar", "x" * (MOST_BYTES + 1)),
    ):
        with pytest.raises(RequestError) as caught:
            after_thinking(too_large)
        assert caught.value.code == "grammar_too_large"
