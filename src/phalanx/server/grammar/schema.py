"""JSON Schemas, in the part that can be enforced exactly."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any
from urllib.parse import unquote

from phalanx.errors import RequestError
from phalanx.server.grammar.proofs import KINDS, Disjointness, Schema, kind_of, target, without_end
from phalanx.server.grammar.regex import to_xgrammar as regex_to_xgrammar

MOST_DEPTH = 32
MOST_NODES = 2000
MOST_LENGTH = 128
"""The longest string length that is counted: beyond it, xgrammar takes tens of milliseconds for every token."""
MOST_MULTIPLE = 100

_ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("discriminator", "externalDocs", "$comment", "$schema", "$id", "$anchor", "$defs", "definitions"),
}
_KEYWORDS = {
    "object": {
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    },
    "array": {"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_TYPED = {"type"}.union(*_KEYWORDS.values())

_MONTH_AND_DAY = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"([1-9][0-9]{{3}})-{_MONTH_AND_DAY}"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
}
_FORMATS = (*_PATTERNS, "duration", "email", "hostname", "ipv6", "uri", "uuid")
_JSON_CHARACTER = r'[^"\\\u0000-\u001f]'


def to_xgrammar(schema: Any, tolerant: bool = False, style: str = "json") -> Schema:
    """The schema for xgrammar; every text it makes of it is valid by the schema given.

    Not the other way round: properties come in the order they are declared and others only where they are asked for,
    numbers have six decimals at most. What xgrammar does not enforce is refused by name, or ignored if `tolerant`. In a
    `style` other than JSON the outermost properties hold raw text, not JSON strings.
    """
    return _Rewriting(schema, tolerant, raw=style != "json").run()


class _Rewriting:
    """One walk through a schema. What `$ref` points to is rewritten once, behind the rest, under a name of its own."""

    def __init__(self, root: Any, tolerant: bool, raw: bool) -> None:
        self._root = root
        self._tolerant = tolerant
        self._raw = raw
        self._nodes = 0
        self._names: dict[tuple[str, bool], str] = {}
        self._definitions: dict[str, Schema] = {}
        self._exclusive: list[tuple[str, list[Schema]]] = []

    def run(self) -> Schema:
        root = self._node(self._root, "#", 0)
        for (pointer, raw), name in self._references():
            self._definitions[name] = self._node(self._find(pointer), pointer, 0, raw)
        self._check_that_all_end()
        self._check_that_one_excludes_the_other()
        return root | {"$defs": self._definitions} if self._definitions else root

    def _references(self) -> Iterator[tuple[tuple[str, bool], str]]:
        """What was referred to so far, and what is referred to there."""
        done = 0
        while done < len(self._names):
            for entry in list(self._names.items())[done:]:
                done += 1
                yield entry

    def _check_that_all_end(self) -> None:
        endless = without_end(self._definitions)
        for (pointer, _), name in self._names.items():
            if name in endless:
                raise RequestError(
                    "bad_schema",
                    f"{pointer} refers to itself without end.",
                    "Make the part that repeats optional, or give it an alternative.",
                )

    def _check_that_one_excludes_the_other(self) -> None:
        disjointness = Disjointness(self._definitions)
        for path, branches in self._exclusive:
            pairs = ((one, other) for index, one in enumerate(branches) for other in branches[:index])
            if not all(disjointness.holds(one, other) for one, other in pairs):
                self._unsupported(path, "oneOf whose branches may overlap (use anyOf, or a required constant in each)")

    def _unsupported(self, path: str, what: str) -> None:
        if not self._tolerant:
            raise RequestError(
                "unsupported_schema", f"{path}: {what} cannot be enforced.", "Leave it out, and check it in the answer."
            )

    def _wrong(self, path: str, why: str) -> None:
        if not self._tolerant:
            raise RequestError("bad_schema", f"{path}: {why}", "Correct the schema.")

    def _only(self, path: str, keywords: set[str], enforced: set[str]) -> None:
        for keyword in sorted(keywords - enforced):
            beside = f" beside '{min(keywords & enforced)}'" if keywords & enforced else ""
            self._unsupported(path, f"'{keyword}'{beside}")

    def _node(self, schema: Any, path: str, depth: int, raw: bool = False) -> Schema:
        self._nodes += 1
        if depth > MOST_DEPTH or self._nodes > MOST_NODES:
            raise RequestError(
                "schema_too_large",
                f"The schema is more than {MOST_DEPTH} levels deep or has more than {MOST_NODES} parts.",
                "Describe less of the answer, or ask for it in several requests.",
            )
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            self._unsupported(path, f"{schema!r:.40} as a schema")
            return {}
        if "$id" in schema and path != "#":
            self._unsupported(path, "'$id' below the root")
        keywords = {key for key in schema if key not in _ANNOTATIONS and not key.startswith("x-")}
        if "$ref" in keywords:
            self._only(path, keywords, {"$ref"})
            return self._reference(schema["$ref"], path, raw)
        if keywords & {"const", "enum"}:
            self._only(path, keywords, {"type", "const" if "const" in keywords else "enum"})
            return self._values(schema, path)
        if keywords & _TYPED:
            self._only(path, keywords, _TYPED)
            return self._typed(schema, keywords, path, depth, raw)
        return self._combined(schema, keywords, path, depth, raw)

    def _reference(self, pointer: Any, path: str, raw: bool) -> Schema:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            self._unsupported(path, f"'$ref' to {pointer!r:.100}, which is no place in this schema,")
            return {}
        name = self._names.setdefault((pointer, raw), f"d{len(self._names)}")
        return {"$ref": f"#/$defs/{name}"}

    def _find(self, pointer: str) -> Any:
        found = self._root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                self._wrong(pointer, "a '$ref' points to this place, but it is not there.")
                return True
        return found

    def _values(self, schema: Schema, path: str) -> Schema:
        values = [schema["const"]] if "const" in schema else self._list(schema, "enum", path)
        if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in _leaves(values)):
            self._unsupported(path, "a whole number of more than 64 bits")
        kinds = set().union(*(KINDS[kind] for kind in self._types(schema, set(), path)))
        possible = [value for value in values if kind_of(value) in kinds]
        if not possible:
            self._wrong(path, "none of the values is possible.")
        return {"enum": possible} if possible else {}

    def _types(self, schema: Schema, keywords: set[str], path: str) -> list[str]:
        """Those declared, else those that the keywords speak of, else all."""
        declared = schema.get("type", [kind for kind, its in _KEYWORDS.items() if its & keywords] or list(KINDS))
        types = [declared] if isinstance(declared, str) else declared
        if not isinstance(types, list) or not types or any(kind not in KINDS for kind in map(str, types)):
            self._wrong(path, f"type is {declared!r:.100}.")
            return list(KINDS)
        return list(dict.fromkeys(types))

    def _typed(self, schema: Schema, keywords: set[str], path: str, depth: int, raw: bool) -> Schema:
        branches = []
        for kind in self._types(schema, keywords, path):
            if kind == "object":
                branches.append(self._object(schema, path, depth))
            elif kind == "array":
                branches.append(self._array(schema, path, depth))
            elif kind == "string":
                branches.append(self._raw_text(schema, path) if raw else self._string(schema, path))
            elif kind in ("integer", "number"):
                branches.append(self._number(schema, kind, path))
            else:
                branches.append({"type": kind})
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _combined(self, schema: Schema, keywords: set[str], path: str, depth: int, raw: bool) -> Schema:
        name = next((name for name in ("anyOf", "oneOf", "allOf") if name in keywords), None)
        self._only(path, keywords, {name} if name else set())
        if name is None:
            return {}
        branches = [
            self._node(branch, f"{path}/{name}/{index}", depth + 1, raw)
            for index, branch in enumerate(self._list(schema, name, path))
        ]
        if not branches:
            self._wrong(path, f"{name} must hold at least one schema.")
            return {}
        if name == "allOf" and len(branches) > 1:
            self._unsupported(path, "allOf with more than one schema")
        if name == "oneOf":
            self._exclusive.append((path, branches))
        return branches[0] if name == "allOf" or len(branches) == 1 else {"anyOf": branches}

    def _raw_text(self, schema: Schema, path: str) -> Schema:
        self._only(path, set(schema) & _KEYWORDS["string"], set())
        return {"type": "string"}

    def _string(self, schema: Schema, path: str) -> Schema:
        low, high = self._bounds(schema, "minLength", "maxLength", path)
        pattern, name = schema.get("pattern"), schema.get("format")
        if (pattern is not None) + (name is not None) + (low > 0 or high is not None) > 1:
            self._unsupported(path, "more than one of pattern, format and length")
        if pattern:
            return self._pattern(pattern, path)
        if name is not None:
            return self._format(name, path)
        if low == 0 and high is None:
            return {"type": "string"}
        if max(low, high or 0) > MOST_LENGTH:
            self._unsupported(path, f"a string length above {MOST_LENGTH}")
            return {"type": "string"}
        return self._of_length(low, high)

    def _pattern(self, pattern: Any, path: str) -> Schema:
        if not isinstance(pattern, str):
            self._wrong(path, f"pattern is {pattern!r:.100}.")
            return {"type": "string"}
        try:
            return {"type": "string", "pattern": f"^(?:{regex_to_xgrammar(pattern, in_json=True)})$"}
        except RequestError:
            if not self._tolerant:
                raise
            return {"type": "string"}

    def _format(self, name: Any, path: str) -> Schema:
        if name not in _FORMATS:
            self._unsupported(path, f"format {name!r:.100} (others can: {', '.join(sorted(_FORMATS))})")
            return {"type": "string"}
        return self._pattern(_PATTERNS[name], path) if name in _PATTERNS else {"type": "string", "format": name}

    def _of_length(self, low: int, high: int | None) -> Schema:
        """Strings of one length share a definition: each takes a while to compile."""
        length = f"{low},{'' if high is None else high}"
        name = f"s{length}"
        self._definitions[name] = {"type": "string", "pattern": f"^{_JSON_CHARACTER}{{{length}}}$"}
        return {"$ref": f"#/$defs/{name}"}

    def _number(self, schema: Schema, kind: str, path: str) -> Schema:
        """Limits are made inclusive and drawn inwards to whole numbers, or to six decimals."""
        given = [schema[name] for name in _KEYWORDS["number"] if name in schema]
        if any(kind_of(value) not in KINDS["number"] for value in given):
            self._wrong(path, "the limits of a number must be numbers.")
            return {"type": kind}
        largest, factor = 2**63 - 1 if kind == "integer" else 2**53, schema.get("multipleOf")
        if any(abs(value) >= largest for value in given):
            self._unsupported(path, f"a limit beyond {largest}")
            return {"type": kind}
        coarse = kind == "integer" or any(abs(value) >= 10**9 for value in given)
        low, high = _inclusive(schema, Decimal(1) if coarse else Decimal("0.000001"))
        if low is not None and high is not None and low > high:
            self._wrong(path, "the limits leave no number.")
            return {"type": kind}
        if factor is not None and (kind == "number" or factor != int(factor) or not 0 < factor <= MOST_MULTIPLE):
            self._unsupported(path, f"multipleOf, other than 1 to {MOST_MULTIPLE} for integers,")
            factor = None
        limits = {"minimum": low, "maximum": high, "multipleOf": factor}
        return {"type": kind} | {name: _plain(limit) for name, limit in limits.items() if limit is not None}

    def _bounds(self, schema: Schema, lowest: str, highest: str, path: str) -> tuple[int, int | None]:
        low, high = schema.get(lowest), schema.get(highest)
        if any(value is not None and (kind_of(value) != "whole" or value < 0) for value in (low, high)):
            self._wrong(path, f"{lowest} and {highest} must be whole numbers of at least 0.")
            return 0, None
        if low is not None and high is not None and low > high:
            self._wrong(path, f"{lowest} is above {highest}.")
            return 0, None
        return int(low or 0), None if high is None else int(high)

    def _list(self, schema: Schema, name: str, path: str) -> list[Any]:
        value = schema.get(name, [])
        if isinstance(value, list):
            return value
        self._wrong(path, f"{name} must be a list.")
        return []

    def _array(self, schema: Schema, path: str, depth: int) -> Schema:
        low, high = self._bounds(schema, "minItems", "maxItems", path)
        if schema.get("uniqueItems") and high != 1:
            self._unsupported(path, "uniqueItems")
        first = [
            self._node(item, f"{path}/prefixItems/{index}", depth + 1)
            for index, item in enumerate(self._list(schema, "prefixItems", path)[:high])
        ]
        out: Schema = {"type": "array"} | ({"prefixItems": first} if first else {})
        others = schema.get("items", schema.get("unevaluatedItems", not first or low > len(first)))
        if others is False or (high is not None and high <= len(first)):
            if low > len(first):
                self._wrong(path, f"minItems is {low}, but only {len(first)} items are possible.")
            return out | {"items": False, "minItems": min(low, len(first))}
        out |= {"items": self._node(others, f"{path}/items", depth + 1), "minItems": low}
        return out | ({} if high is None else {"maxItems": high})

    def _object(self, schema: Schema, path: str, depth: int) -> Schema:
        """Declared properties in their order; then others, if they are asked for or none are declared."""
        raw = self._raw and path == "#"
        others = self._others(schema, path, depth, raw)
        properties = self._properties(schema, others, path, depth, raw)
        required = [name for name in properties if name in self._list(schema, "required", path)]
        declares = bool(properties) or "properties" in schema
        names = self._free_names(schema, declares, others, path, depth)
        out: Schema = {"type": "object"} | names
        if properties:
            out |= {"properties": properties, "required": required}
        is_closed = others is False or (others is None and (declares or "patternProperties" in names))
        out["additionalProperties"] = not is_closed and (others or True)
        has_free_names = not is_closed or "patternProperties" in names
        return out | self._property_counts(schema, len(required), has_free_names, path)

    def _others(self, schema: Schema, path: str, depth: int, raw: bool) -> Schema | bool | None:
        """What undeclared properties must be: a schema, True for anything, False for none, None if unsaid."""
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
        if others is None or isinstance(others, bool):
            return others
        return self._node(others, f"{path}/additionalProperties", depth + 1, raw) or True

    def _properties(
        self, schema: Schema, others: Schema | bool | None, path: str, depth: int, raw: bool
    ) -> dict[str, Schema]:
        """Those declared, and those required without being declared."""
        declared, names = schema.get("properties", {}), self._list(schema, "required", path)
        required = [name for name in names if isinstance(name, str)]
        if not isinstance(declared, dict) or len(required) < len(names):
            self._wrong(path, "properties must be an object and required a list of names.")
            declared = declared if isinstance(declared, dict) else {}
        properties: dict[str, Schema] = {}
        for name, value in declared.items():
            if value is not False:
                properties[name] = self._node(value, f"{path}/properties/{name}", depth + 1, raw)
        for name in required:
            if name not in properties and (others is False or name in declared):
                self._wrong(path, f"the required property {name!r:.100} is not allowed.")
            elif name not in properties:
                properties[name] = others if isinstance(others, dict) else {}
        return properties

    def _free_names(
        self, schema: Schema, declares: bool, others: Schema | bool | None, path: str, depth: int
    ) -> Schema:
        """Rules for names. xgrammar keeps them only where no two can speak of the same name."""
        patterns, names = schema.get("patternProperties"), schema.get("propertyNames")
        if patterns is None and names is None:
            return {}
        if declares or (patterns is not None and (others or names is not None)):
            self._unsupported(path, "patternProperties or propertyNames beside other rules for names")
            return {}
        if names is not None:
            rule = self._node({"type": "string"} | names if isinstance(names, dict) else names, path, depth + 1)
            return {"propertyNames": self._definitions[target(rule)] if "$ref" in rule else rule}
        if not isinstance(patterns, dict) or len(patterns) != 1:
            self._unsupported(path, "patternProperties with other than one pattern")
            return {}
        ((pattern, value),) = patterns.items()
        rule, value = self._pattern(pattern, path), self._node(value, f"{path}/patternProperties", depth + 1)
        return {"patternProperties": {rule["pattern"]: value}} if "pattern" in rule else {}

    def _property_counts(self, schema: Schema, required: int, has_free_names: bool, path: str) -> Schema:
        """How many properties. Where names are free one may come twice, and counts once."""
        low, high = self._bounds(schema, "minProperties", "maxProperties", path)
        if has_free_names and low > max(required, 1):
            self._unsupported(path, "minProperties above 1 where names are free")
            low = 0
        return ({"minProperties": low} if low > required else {}) | ({} if high is None else {"maxProperties": high})


def _inclusive(schema: Schema, unit: Decimal) -> tuple[Decimal | None, Decimal | None]:
    def drawn(name: str, rounding: str, step: Decimal | int) -> list[Decimal]:
        return [Decimal(repr(schema[name])).quantize(unit, rounding) + step] if name in schema else []

    lows = drawn("minimum", ROUND_CEILING, 0) + drawn("exclusiveMinimum", ROUND_FLOOR, unit)
    highs = drawn("maximum", ROUND_FLOOR, 0) + drawn("exclusiveMaximum", ROUND_CEILING, -unit)
    return max(lows, default=None), min(highs, default=None)


def _plain(number: Decimal | float) -> int | float:
    return int(number) if number == int(number) else float(number)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value
