"""What can be known of a schema before any text is made from it. Schemas here are those `schema.to_xgrammar` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]
Definitions = Mapping[str, Schema]

KINDS = {
    "null": {"null"},
    "boolean": {"boolean"},
    "integer": {"whole"},
    "number": {"whole", "fraction"},
    "string": {"string"},
    "array": {"array"},
    "object": {"object"},
}
"""The JSON types of a schema by the kinds of values they allow."""

_MOST_STEPS = 500


def kind_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "whole" if value == int(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def target(node: Schema) -> str:
    """The name of the definition that a node refers to."""
    return str(node["$ref"]).removeprefix("#/$defs/")


def without_end(definitions: Definitions) -> set[str]:
    """Definitions by which no finite text is valid: a model that enters one never comes out."""
    endless = set(definitions)
    while ending := {name for name in endless if _can_end(definitions[name], endless)}:
        endless -= ending
    return endless


def _can_end(node: Schema, endless: set[str]) -> bool:
    if "$ref" in node:
        return target(node) not in endless
    if "anyOf" in node:
        return any(_can_end(branch, endless) for branch in node["anyOf"])
    needed = [node["properties"][name] for name in node.get("required", [])]
    if node.get("minProperties", 0) > len(needed):
        needed += [*node.get("properties", {}).values(), node.get("additionalProperties")]
    if fewest := node.get("minItems", 0):
        first = node.get("prefixItems", [])
        needed += first[:fewest] + [node["items"]] * (fewest > len(first))
    return all(_can_end(part, endless) for part in needed if isinstance(part, dict))


class Disjointness:
    """Whether surely no value is valid by two schemas: by their types, their constants, or a required property.

    What takes too long to find out is not sure.
    """

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._steps_left = _MOST_STEPS

    def holds(self, one: Schema, other: Schema) -> bool:
        self._steps_left -= 1
        if self._steps_left < 0:
            return False
        for first, second in ((one, other), (other, one)):
            if "$ref" in first:
                return self.holds(self._definitions[target(first)], second)
            if "anyOf" in first:
                return all(self.holds(branch, second) for branch in first["anyOf"])
        if "enum" in one and "enum" in other:
            return not any(value in other["enum"] for value in one["enum"])
        if not _kinds(one) & _kinds(other):
            return True
        shared = set(one.get("required", [])) & set(other.get("required", []))
        return one.get("type") == other.get("type") == "object" and any(
            self.holds(one["properties"][name], other["properties"][name]) for name in sorted(shared)
        )


def _kinds(node: Schema) -> set[str]:
    if "enum" in node:
        return {kind_of(value) for value in node["enum"]}
    return KINDS[node["type"]] if "type" in node else set().union(*KINDS.values())
