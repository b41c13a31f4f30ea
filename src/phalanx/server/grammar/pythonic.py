"""Calls written as in Python, `[weather(city="Rome", days=3), now()]`, as an EBNF grammar."""

from __future__ import annotations

import json
import keyword
from collections.abc import Callable
from typing import Any

import msgspec

from phalanx.errors import RequestError
from phalanx.server.grammar.proofs import Schema, target
from phalanx.server.grammar.schema import to_xgrammar

_LITERALS = r"""
any ::= string | number | "True" | "False" | "None" | list | dict
string ::= "\"" ([^"\\\x00-\x1f] | escape)* "\"" | "'" ([^'\\\x00-\x1f] | escape)* "'"
escape ::= "\\" ["'\\nrt]
integer ::= "-"? ("0" | [1-9] [0-9]*)
number ::= integer ("." [0-9]+)? ([eE] [+\-]? [0-9]+)?
boolean ::= "True" | "False"
null ::= "None"
list ::= "[" (any (", " any)*)? "]"
dict ::= "{" (string ": " any (", " string ": " any)*)? "}"
keywords ::= (keyword (", " keyword)*)?
keyword ::= [a-z_] [a-z0-9_]* "=" any
"""
_RULES = {"array": "list", "object": "dict"} | {
    kind: kind for kind in ("string", "integer", "number", "boolean", "null")
}


class CallableFunction(msgspec.Struct, frozen=True):
    name: str
    parameters: Schema


class PythonicCalls(msgspec.Struct, frozen=True):
    """A part of a structural tag: a list of calls of these functions, or of one call."""

    functions: list[CallableFunction]
    only_one: bool

    def to_ebnf(self) -> str:
        """With the names of parameters and their types, but neither bounds nor patterns."""
        rules = _Rules()
        call = rules.add(" | ".join(map(rules.call, self.functions)))
        more = "" if self.only_one else f' (", " {call})*'
        return f'root ::= "[" {call}{more} "]"\n' + "\n".join(rules.lines) + _LITERALS


class _Rules:
    """Rules made on the way, named by number."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._definitions: dict[str, Schema] = {}
        self._numbers: dict[str, int] = {}

    def add(self, expression: str) -> str:
        self.lines.append(f"r{len(self.lines)} ::= {expression}")
        return f"r{len(self.lines) - 1}"

    def call(self, function: CallableFunction) -> str:
        _check_name(function.name, function.name.split("."))
        node = to_xgrammar(function.parameters, tolerant=True)
        self._definitions, self._numbers = node.get("$defs", {}), {}
        if "properties" in node:
            _check_name(function.name, list(node["properties"]))
            arguments = self._entries(node, lambda name: f"{name}=")
        else:
            arguments = "keywords" if node["additionalProperties"] else '""'
        return f'{_text(function.name + "(")} {arguments} ")"'

    def _entries(self, node: Schema, beginning: Callable[[str], str]) -> str:
        """Properties in their order, joined by commas: from the last one on, each as first and as later entry."""
        first = later = self.add('""')
        for name, value in reversed(node["properties"].items()):
            entry = f"{_text(beginning(name))} {self._value(value)} {later}"
            left_out = ("", "") if name in node["required"] else (f" | {first}", f" | {later}")
            first, later = self.add(entry + left_out[0]), self.add(f'", " {entry}{left_out[1]}')
        return first

    def _value(self, node: Schema) -> str:
        kind = node.get("type")
        if "$ref" in node:
            return self._definition(target(node))
        if "enum" in node:
            return self.add(" | ".join(_text(_literal(value)) for value in node["enum"]))
        if "anyOf" in node:
            return self.add(" | ".join(map(self._value, node["anyOf"])))
        if kind == "array" and isinstance(node["items"], dict) and "prefixItems" not in node:
            item = self._value(node["items"])
            return self.add(f'"[" ({item} (", " {item})*)? "]"')
        if kind == "object" and "properties" in node:
            return self.add(f'"{{" {self._entries(node, lambda name: f"{_literal(name)}: ")} "}}"')
        return _RULES[kind] if kind else "any"

    def _definition(self, name: str) -> str:
        """One rule for a definition, reserved before it is written: it may refer to itself."""
        if name not in self._numbers:
            self._numbers[name] = len(self.lines)
            self.lines.append("")
            self.lines[self._numbers[name]] = f"r{self._numbers[name]} ::= {self._value(self._definitions[name])}"
        return f"r{self._numbers[name]}"


def _check_name(function: str, names: list[str]) -> None:
    for name in names:
        if not name.isascii() or not name.isidentifier() or keyword.iskeyword(name):
            raise RequestError(
                "bad_tool",
                f"The tool {function!r:.100} has {name!r:.100} in it, which is no name in Python.",
                "Rename it: this model writes calls as Python does.",
            )


def _literal(value: Any) -> str:
    """A JSON value as Python writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _text(text: str) -> str:
    """A text in quotes, as EBNF writes it."""
    return json.dumps(text, ensure_ascii=False)
