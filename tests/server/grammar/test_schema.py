"""Every text made by a schema is valid by it, as `jsonschema` says; what cannot be enforced is refused by name."""

from __future__ import annotations

import ipaddress
import json
import re
import uuid
from datetime import date, datetime, time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from phalanx.errors import RequestError
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.grammar.schema import MOST_DEPTH, MOST_LENGTH, MOST_NODES, to_xgrammar

from .conftest import Texts

TEXT, WHOLE, OBJECT, LIST = ({"type": kind} for kind in ("string", "integer", "object", "array"))
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": WHOLE}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "name": TEXT}, "required": ["kind"]}

ENFORCED: dict[str, Any] = {
    "anything": True,
    "an empty schema": {},
    "strings": TEXT,
    "booleans": {"type": "boolean"},
    "null": {"type": "null"},
    "objects": OBJECT,
    "arrays": LIST,
    "several types": {"type": ["string", "null", "integer"], "minLength": 2, "minimum": 5},
    "annotations": {"type": "integer", "title": "T", "description": "d", "default": 3, "examples": [1], "x-mine": {}},
    "enum": {"enum": ["a", 1, None, {"x": [1.5, True]}, 0.1, 1e-7, 2**53 + 1]},
    "const": {"const": {"a": [1, 'é"\\\n']}},
    "enum with a type": {"type": "string", "enum": ["a", 1]},
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "minLength": {"minLength": 3},
    "maxLength 0": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[a-c]+$"},
    "pattern without anchors": {"pattern": "[a-c]+|x"},
    "pattern of alternatives": {"type": "string", "pattern": "^a|b$"},
    "integers": WHOLE,
    "integer limits": {"type": "integer", "minimum": -5, "maximum": 17},
    "exclusive integer limits": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "several integer limits": {"type": "integer", "minimum": 3, "exclusiveMinimum": 4, "maximum": 6},
    "fractions as integer limits": {"type": "integer", "minimum": 2.5, "exclusiveMaximum": 4.5},
    "large integers": {"type": "integer", "minimum": 2**53 + 1},
    "a format beside nothing": {"format": "ipv4"},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": -40, "maximum": 60},
    "numbers": {"type": "number"},
    "number limits": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "exclusive number limits": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "fine number limits": {"minimum": 0.1234567891, "maximum": 0.1234599999},
    "one number": {"type": "number", "minimum": 4.35, "maximum": 4.35},
    "large exclusive limits": {"type": "number", "exclusiveMinimum": 10**15, "exclusiveMaximum": 10**15 + 4},
    "items": {"type": "array", "items": WHOLE},
    "no items": {"type": "array", "items": False},
    "counted items": {"type": "array", "items": WHOLE, "minItems": 2, "maxItems": 3},
    "counted items of any kind": {"minItems": 2, "maxItems": 3},
    "prefixItems": {"type": "array", "prefixItems": [WHOLE, TEXT]},
    "prefixItems and others": {
        **LIST,
        "prefixItems": [WHOLE, TEXT],
        "items": {"type": "null"},
        "minItems": 3,
        "maxItems": 4,
    },
    "prefixItems cut short": {**LIST, "prefixItems": [WHOLE, TEXT], "maxItems": 1},
    "prefixItems and more": {**LIST, "prefixItems": [WHOLE], "minItems": 2, "maxItems": 3},
    "unevaluatedItems": {**LIST, "prefixItems": [WHOLE], "unevaluatedItems": False},
    "one unique item": {**LIST, "items": WHOLE, "uniqueItems": True, "maxItems": 1},
    "properties": {**OBJECT, "properties": {"a": WHOLE, "b": TEXT}, "required": ["a"]},
    "properties without a type": {"properties": {"a": WHOLE, "b": TEXT}, "required": ["b"]},
    "names to be escaped": {
        **OBJECT,
        "properties": {'a"b\\': WHOLE, "é": WHOLE, "": WHOLE, "a b": WHOLE},
        "required": ['a"b\\'],
    },
    "required but not declared": {**OBJECT, "properties": {"a": WHOLE}, "required": ["a", "z"]},
    "required only": {**OBJECT, "required": ["z"]},
    "required of others": {**OBJECT, "additionalProperties": WHOLE, "required": ["z"]},
    "other properties": {**OBJECT, "properties": {"a": TEXT}, "additionalProperties": WHOLE},
    "any other properties": {**OBJECT, "properties": {"a": WHOLE}, "additionalProperties": True},
    "no other properties": {**OBJECT, "properties": {}, "additionalProperties": False},
    "unevaluatedProperties": {**OBJECT, "properties": {"a": WHOLE}, "unevaluatedProperties": False},
    "a forbidden property": {**OBJECT, "properties": {"a": False, "b": WHOLE}},
    "at least one property": {**OBJECT, "minProperties": 1},
    "counted properties": {
        **OBJECT,
        "properties": {"a": WHOLE, "b": WHOLE, "c": WHOLE},
        "minProperties": 2,
        "maxProperties": 2,
    },
    "maxProperties": {**OBJECT, "additionalProperties": WHOLE, "maxProperties": 1},
    "patternProperties": {**OBJECT, "patternProperties": {"^a[0-9]$": WHOLE}},
    "propertyNames": {**OBJECT, "propertyNames": {"pattern": "^[a-c]+$"}},
    "propertyNames by length": {**OBJECT, "propertyNames": {"maxLength": 2}, "additionalProperties": WHOLE},
    "propertyNames by choice": {**OBJECT, "propertyNames": {"enum": ["a", "b"]}},
    "anyOf": {"anyOf": [WHOLE, TEXT]},
    "oneOf by type": {"oneOf": [WHOLE, TEXT, {"type": "null"}]},
    "oneOf by constant": {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "$defs": {"cat": CAT, "dog": DOG},
    },
    "allOf of one": {"allOf": [{"type": "integer", "minimum": 5}]},
    "$ref": {"$defs": {"n": WHOLE}, **OBJECT, "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]},
    "$ref beside a title": {"definitions": {"n": WHOLE}, "$ref": "#/definitions/n", "title": "T"},
    "$ref with escapes": {
        "$defs": {"a/b": WHOLE, "c d": TEXT},
        "prefixItems": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c%20d"}],
    },
    "$ref into a list": {**LIST, "prefixItems": [WHOLE, {"$ref": "#/prefixItems/0"}], "minItems": 2},
    "$ref to itself": {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
    "$ref to the root": {
        **OBJECT,
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    },
    "an array of itself": {
        "$defs": {"t": {**LIST, "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
        "$ref": "#/$defs/t",
    },
}

REFUSED: dict[str, tuple[Any, str]] = {
    "const against its type": ({"type": "string", "const": 5}, "none of the values"),
    "an empty enum": ({"enum": []}, "none of the values"),
    "a huge constant": ({"const": 10**25}, "64 bits"),
    "pattern with length": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "more than one of pattern"),
    "format with length": ({"type": "string", "format": "date", "maxLength": 3}, "more than one of pattern"),
    "a long string": ({"type": "string", "maxLength": MOST_LENGTH + 1}, f"above {MOST_LENGTH}"),
    "lookahead": ({"type": "string", "pattern": "(?=a)b"}, r"\(\?="),
    "an unknown format": ({"type": "string", "format": "iri"}, "format 'iri'"),
    "a format that is no name": ({"type": "string", "format": ["date"]}, "format"),
    "multipleOf for numbers": ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    "a large multipleOf": ({"type": "integer", "multipleOf": 1021}, "multipleOf"),
    "multipleOf 0": ({"type": "integer", "multipleOf": 0}, "multipleOf"),
    "limits that exclude all": ({"type": "integer", "minimum": 5, "maximum": 3}, "leave no number"),
    "limits too close": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-7}, "leave no number"),
    "limits too far": ({"type": "integer", "minimum": 2**63}, "a limit beyond"),
    "limits too far for numbers": ({"type": "number", "maximum": 1e300}, "a limit beyond"),
    "a limit that is no number": ({"type": "integer", "exclusiveMinimum": True}, "must be numbers"),
    "uniqueItems": ({**LIST, "items": {"enum": [1, 2]}, "uniqueItems": True}, "uniqueItems"),
    "contains": ({**LIST, "contains": {"const": 5}}, "'contains'"),
    "items as a list": ({**LIST, "items": [WHOLE]}, "as a schema"),
    "too few items possible": ({**LIST, "prefixItems": [WHOLE], "items": False, "minItems": 2}, "only 1 items"),
    "counts the wrong way": ({**LIST, "minItems": 5, "maxItems": 3}, "minItems is above maxItems"),
    "a count that is none": ({"type": "string", "minLength": -1}, "minLength"),
    "two patterns of names": ({**OBJECT, "patternProperties": {"^a": WHOLE, "^b": TEXT}}, "patternProperties"),
    "patternProperties beside properties": (
        {**OBJECT, "properties": {"aa": TEXT}, "patternProperties": {"^a": WHOLE}},
        "beside other",
    ),
    "patternProperties beside others": (
        {**OBJECT, "additionalProperties": TEXT, "patternProperties": {"^a": WHOLE}},
        "beside other",
    ),
    "propertyNames beside properties": (
        {**OBJECT, "properties": {"z": WHOLE}, "propertyNames": {"pattern": "^a"}},
        "beside other",
    ),
    "minProperties of free names": ({**OBJECT, "additionalProperties": WHOLE, "minProperties": 2}, "minProperties"),
    "minProperties of patterns": ({**OBJECT, "patternProperties": {"^a": WHOLE}, "minProperties": 2}, "minProperties"),
    "a required property that is forbidden": (
        {**OBJECT, "properties": {"a": False}, "required": ["a"]},
        "'a' is not allowed",
    ),
    "a required property beside a closed list": (
        {**OBJECT, "additionalProperties": False, "required": ["a"]},
        "not allowed",
    ),
    "required that is no list": ({**OBJECT, "required": "a"}, "required must be a list"),
    "dependentRequired": (
        {**OBJECT, "properties": {"a": WHOLE}, "dependentRequired": {"a": ["b"]}},
        "'dependentRequired'",
    ),
    "dependentSchemas": ({**OBJECT, "dependentSchemas": {"a": {}}}, "'dependentSchemas'"),
    "anyOf beside a type": ({**OBJECT, "anyOf": [{"required": ["a"]}]}, "'anyOf' beside 'type'"),
    "an empty anyOf": ({"anyOf": []}, "at least one"),
    "oneOf that may overlap": ({"oneOf": [WHOLE, {"type": "number"}]}, "oneOf"),
    "oneOf without a required constant": ({"oneOf": [{**CAT, "required": []}, {**DOG, "required": []}]}, "oneOf"),
    "oneOf through anyOf": ({"oneOf": [{"anyOf": [WHOLE, TEXT]}, {"const": "a"}]}, "oneOf"),
    "allOf of two": ({"allOf": [WHOLE, {"minimum": 5}]}, "allOf"),
    "not": ({"type": "integer", "not": {"const": 5}}, "'not'"),
    "if": ({"if": {"const": 5}, "then": {}}, "'if'"),
    "keywords beside $ref": ({"$defs": {"n": WHOLE}, "$ref": "#/$defs/n", "minimum": 5}, "'minimum' beside '\\$ref'"),
    "$ref without end": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "without end",
    ),
    "a required part of itself": ({**OBJECT, "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "without end"),
    "items of itself": ({**LIST, "items": {"$ref": "#"}, "minItems": 1}, "without end"),
    "$ref elsewhere": ({"$ref": "http://example.org/x.json"}, "no place in this schema"),
    "$ref by anchor": ({"$defs": {"n": {"$anchor": "N"}}, "$ref": "#N"}, "no place in this schema"),
    "$ref to nothing": ({"$ref": "#/$defs/none"}, "it is not there"),
    "$dynamicRef": ({"$dynamicRef": "#N"}, "dynamicRef"),
    "$id inside": ({**LIST, "items": {"$id": "x", "type": "integer"}}, "below the root"),
    "an unknown keyword": ({"type": "string", "maxlength": 3}, "'maxlength'"),
    "nullable": ({"type": "string", "nullable": True}, "'nullable'"),
    "contentEncoding": ({"type": "string", "contentEncoding": "base64"}, "'contentEncoding'"),
    "an unknown type": ({"type": "text"}, "type is 'text'"),
    "false": (False, "False as a schema"),
    "no schema at all": ([], "as a schema"),
}


def constraint(schema: Any, tolerant: bool = False) -> Constraint:
    return Constraint("json_schema", json.dumps(schema), tolerant)


@pytest.mark.parametrize("name", ENFORCED)
def test_every_text_is_valid(name: str, texts: Texts) -> None:
    schema = ENFORCED[name]
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for text in texts(constraint(schema)):
        validator.validate(json.loads(text))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(name: str) -> None:
    schema, says = REFUSED[name]
    with pytest.raises(RequestError, match=says) as caught:
        to_xgrammar(schema)
    assert caught.value.code in ("unsupported_schema", "bad_schema", "unsupported_regex")


@pytest.mark.parametrize("name", [name for name, (_, says) in REFUSED.items() if says != "without end"])
def test_in_a_tool_it_is_a_hint_and_gives_json_all_the_same(name: str, texts: Texts) -> None:
    for text in texts(constraint(REFUSED[name][0], tolerant=True), count=10):
        json.loads(text)


def test_a_hint_does_not_cost_what_can_be_enforced(texts: Texts) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^(?=x).*$"},
            "b": {**LIST, "items": WHOLE, "uniqueItems": True},
        },
        "required": ["a", "b"],
        "anyOf": [{"required": ["a"]}],
        "if": {},
    }
    for text in texts(constraint(schema, tolerant=True)):
        answer = json.loads(text)
        assert isinstance(answer["a"], str)
        assert all(isinstance(item, int) for item in answer["b"])


FORMATS = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
    "duration": re.compile(r"P(?!$)(\d+Y)?(\d+M)?(\d+W)?(\d+D)?(T(?!$)(\d+H)?(\d+M)?(\d+S)?)?").fullmatch,
    "email": re.compile(r"[\w!#$%&'*+/=?^`{|}~.-]+@[A-Za-z0-9.-]+", re.ASCII).fullmatch,
    "hostname": re.compile(
        r"([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    ).fullmatch,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[\w\-.~:/?#\[\]@!$&'()*+,;=%]*", re.ASCII).fullmatch,
    "uuid": uuid.UUID,
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_that_others_read(name: str, texts: Texts) -> None:
    for text in texts(constraint({"type": "string", "format": name}), count=80):
        assert FORMATS[name](json.loads(text)), text


def test_properties_come_in_the_order_of_the_schema_and_only_those(texts: Texts) -> None:
    schema = {**OBJECT, "properties": {"z": WHOLE, "a": WHOLE, "m": WHOLE}, "required": ["m", "z"]}
    found = {tuple(json.loads(text)) for text in texts(constraint(schema))}
    assert found == {("z", "m"), ("z", "a", "m")}


def test_strings_of_one_length_are_compiled_once() -> None:
    short = {"type": "string", "maxLength": 9}
    schema = to_xgrammar({**OBJECT, "properties": {"a": short, "b": short, "c": {**short, "minLength": 1}}})
    assert len(schema["$defs"]) == 2
    assert schema["properties"]["a"] == schema["properties"]["b"] != schema["properties"]["c"]


def nested(depth: int) -> Any:
    schema: Any = WHOLE
    for _ in range(depth):
        schema = {**LIST, "items": schema}
    return schema


def test_depth_and_size_are_limited() -> None:
    to_xgrammar(nested(MOST_DEPTH))
    for too_large in (
        nested(MOST_DEPTH + 1),
        {**OBJECT, "properties": {str(index): WHOLE for index in range(MOST_NODES)}},
    ):
        with pytest.raises(RequestError) as caught:
            to_xgrammar(too_large)
        assert caught.value.code == "schema_too_large"


def test_a_proof_that_takes_too_long_is_none() -> None:
    """Branches that refer to each other so that comparing them would take for ever."""
    either = {"anyOf": [{**LIST, "items": WHOLE}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    with pytest.raises(RequestError, match="may overlap"):
        to_xgrammar({"$defs": {"a": either}, "oneOf": [{"$ref": "#/$defs/a"}, {**TEXT}, {"$ref": "#/$defs/a"}]})


scalars = st.one_of(
    st.just({}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, TEXT, WHOLE, {"type": "number"}]),
    st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda pair: {"minLength": pair[0], "maxLength": sum(pair)}),
    st.tuples(st.integers(-50, 50), st.integers(0, 40)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "exclusiveMaximum": sum(pair) + 1}
    ),
    st.tuples(st.floats(-9, 9), st.floats(0.5, 9)).map(
        lambda pair: {"exclusiveMinimum": pair[0], "maximum": sum(pair)}
    ),
    st.lists(st.sampled_from(["a", "b", 1, 2.5, True, None, [1], {"k": "v"}]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(["^[ab]{1,3}$", "x|y", "^-\\d?$"]).map(lambda pattern: {"type": "string", "pattern": pattern}),
)


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "c", 'q"'])
    return st.one_of(
        st.builds(
            lambda properties, required, others: {**OBJECT, "properties": properties, "required": required} | others,
            st.dictionaries(names, inner, max_size=3),
            st.lists(names, max_size=2, unique=True),
            st.one_of(
                st.just({}), st.just({"additionalProperties": True}), inner.map(lambda s: {"additionalProperties": s})
            ),
        ),
        st.builds(
            lambda items, few, more: {"items": items, "minItems": few, "maxItems": few + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {**LIST, "prefixItems": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
    )


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=st.recursive(scalars, composed, max_leaves=6))
def test_any_schema_of_these_makes_valid_texts(schema: Any, texts: Texts) -> None:
    validator = Draft202012Validator(schema)
    for text in texts(constraint(schema), count=6):
        validator.validate(json.loads(text))
