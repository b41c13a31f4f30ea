"""Qwen3 Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>..</function></tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from phalanx.server.markup import CALL, END_CALL, END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER
from phalanx.server.parsers.json_text import parse_json, to_json
from phalanx.server.parsers.state_machine import ParserState, Tags, ToolParser, name_at, word_at

_OUTSIDE = Tags(CALL, FUNCTION, END_CALL)
_IN_FUNCTION = Tags(PARAMETER, END_FUNCTION, END_CALL, CALL, FUNCTION)
_AFTER_VALUE = Tags(END_PARAMETER, PARAMETER, END_FUNCTION)
_END_OF_NAME = re.compile(r"[<>\n]")


class Qwen3Xml(ToolParser):
    """Values have the types of the tool's schema; strings go out as they come, others when they are complete.

    One newline on each side of a value is markup. End tags may be missing: a value ends where the next tag begins, a
    function with `</tool_call>`, the next call or the text. A text that ends inside a value leaves the arguments
    unfinished: half a value must not look like a whole one. Text between parameters is content.
    """

    special_tags = False
    opening = CALL

    def _outside(self, text: str, at: int, final: bool) -> int:
        at, tag = self._say_until(_OUTSIDE, text, at, final)
        if tag == CALL:
            self._open(tag, self._opened)
        elif tag == FUNCTION:
            self._open(tag, self._function_name)
        elif tag == END_CALL:
            self._drop_end_tag(tag)
        return at

    def _opened(self, text: str, at: int, final: bool) -> int:
        at = self._gather_space(text, at)
        tag = word_at(text, at, (FUNCTION,), final)
        if tag is None:
            return at
        if tag:
            self._open(tag, self._function_name)
        else:
            self._give_up(self._outside)
        return at + len(tag)

    def _read_name(self, text: str, at: int, final: bool, otherwise: ParserState) -> tuple[int, str]:
        """The name up to `>`; "" while it is unfinished, and when it is none: then `otherwise` is next."""
        end, name = name_at(text, at, _END_OF_NAME, final)
        if name and text[end] == ">":
            self._gathered.clear()
            return end + 1, name
        if name is not None:
            self._give_up(otherwise)
        return at, ""

    def _function_name(self, text: str, at: int, final: bool) -> int:
        at, name = self._read_name(text, at, final, otherwise=self._outside)
        if name:
            self._schema = self._schemas.get(name, {})
            self._num_values = 0
            self._writer.call(name)
            self._state = self._function
        return at

    def _function(self, text: str, at: int, final: bool) -> int:
        at, tag = self._say_until(_IN_FUNCTION, text, at, final)
        if tag == PARAMETER:
            self._open(tag, self._key)
        elif tag or final:
            self._writer.argue("}" if self._num_values else "{}")
            self._end_tag_due = tag != END_CALL
            self._state = self._outside
        return at - len(tag) if tag in (CALL, FUNCTION) else at

    def _key(self, text: str, at: int, final: bool) -> int:
        at, key = self._read_name(text, at, final, otherwise=self._function)
        if key:
            self._writer.argue(f"{', ' if self._num_values else '{'}{to_json(key)}: ")
            self._num_values += 1
            self._types = _types_of(self._schema, key)
            self._state = self._before_value
        return at

    def _before_value(self, text: str, at: int, final: bool) -> int:
        if at == len(text) and not final:
            return at
        if self._types == {"string"}:
            self._writer.argue('"')
            self._state = self._string
        else:
            self._state = self._typed_value
        return at + text.startswith("\n", at)

    def _string(self, text: str, at: int, final: bool) -> int:
        end, after, ended = _value_end(text, at, final)
        self._writer.argue(to_json(text[at:end])[1:-1])
        if ended:
            self._writer.argue('"')
            self._state = self._function
        return after

    def _typed_value(self, text: str, at: int, final: bool) -> int:
        end, after, ended = _value_end(text, at, final)
        self._gathered.append(text[at:end])
        if ended:
            self._writer.argue(_typed(self._take_gathered(), self._types))
            self._state = self._function
        elif final:
            self._writer.argue(self._take_gathered())
        return after


def _value_end(text: str, at: int, final: bool) -> tuple[int, int, bool]:
    """How far the value is known to reach, where to read on, and whether the value has ended."""
    end, tag = _AFTER_VALUE.find(text, at, final)
    after = end + len(tag) if tag == END_PARAMETER else end
    if text.endswith("\n", at, end) and (tag or not final):
        end -= 1
    return end, after if tag else end, bool(tag)


def _types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types a tool's schema allows for a key, through unions and references; string where it says none."""
    types: set[str] = set()
    todo, seen = [_at(schema, "properties", key)], set()
    while todo:
        part = todo.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        for stated in _as_list(part.get("type")):
            types.add(str(stated))
        for union in ("anyOf", "oneOf", "allOf"):
            todo.extend(_as_list(part.get(union)))
        if isinstance(reference := part.get("$ref"), str):
            todo.append(_at(schema, *reference.removeprefix("#/").split("/")))
    return frozenset(types) or frozenset({"string"})


def _at(schema: Any, *path: str) -> Any:
    for key in path:
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "object": dict,
    "array": list,
}


def _typed(text: str, types: Set[str]) -> str:
    """A value as JSON text: of one of the types if it reads as one, else a string."""
    word = text.strip()
    if "null" in types and word in ("null", "None"):
        return "null"
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    value = parse_json(word)
    for name, python_type in _PYTHON_TYPES.items():
        if name in types and isinstance(value, python_type) and not isinstance(value, bool):
            return word
    return to_json(text)
