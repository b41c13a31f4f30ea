"""Regular expressions, in the dialect that can be enforced exactly."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from phalanx.errors import RequestError

_GROUP = re.compile(r"\(\?(:|P?<[A-Za-z_]\w*>)")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_SETS = {"s": r" \t\n\r\f\v"} | {name: f"\\{name}" for name in "dDwWS"}
_ANY = r"[^\n\r\u2028\u2029]"
_CARET = r"\^"
_META = "\\^$.|?*+()[]{}-/"


def to_xgrammar(pattern: str, in_json: bool = False) -> str:
    """The pattern for xgrammar, matching the whole text; within a JSON string, in its escaped form.

    xgrammar reads some constructs otherwise than others do, without a word: anchors in the middle, unknown escapes, a
    dot before a line end, a quote in a JSON string. These are translated or refused here. `\\d`, `\\w` and `\\s` are
    those of ASCII.
    """
    return _Translation(pattern, in_json).run()


class _Translation:
    def __init__(self, pattern: str, in_json: bool) -> None:
        self._pattern = pattern
        self._in_json = in_json
        self._at = 0

    def run(self) -> str:
        out, depth = [], 0
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            if character == "[":
                out.append(self._class())
            elif character == "(":
                depth += 1
                out.append(self._open_group())
            elif character in "^$":
                self._skip_anchor(character, depth)
            elif character in "|)*+?{}":
                depth -= character == ")"
                self._at += 1
                out.append(character)
            elif character == ".":
                self._at += 1
                out.append(_ANY)
            else:
                atom = self._atom()
                out.append(self._literal(atom) if len(atom) == 1 else f"[{atom}]")
        return "".join(out)

    def _atom(self) -> str:
        """The next character, or the inside of a class for an escape that stands for several."""
        character = self._pattern[self._at]
        if character != "\\":
            self._at += 1
            return character
        hexadecimal = _HEX.match(self._pattern, self._at + 1)
        if hexadecimal:
            code = int(hexadecimal[1] or hexadecimal[2], 16)
            if 0xD800 <= code <= 0xDFFF:
                self._refuse("half a character")
            self._at = hexadecimal.end()
            return chr(code)
        escaped = self._pattern[self._at + 1 : self._at + 2]
        if not escaped or (escaped.isalnum() and escaped not in _SETS and escaped not in _CONTROLS):
            self._refuse(f"the escape \\{escaped}")
        self._at += 2
        return _SETS.get(escaped) or _CONTROLS.get(escaped, escaped)

    def _literal(self, character: str) -> str:
        if self._in_json and _is_unsafe(character):
            return "(?:" + "".join(map(_escaped, json.dumps(character)[1:-1])) + ")"
        return _escaped(character)

    def _class(self) -> str:
        """A class. In a JSON string it goes without the characters that would have to be escaped there.

        xgrammar takes even an escaped caret for a negation where it comes first.
        """
        start = self._at
        negated = self._pattern.startswith("[^", start)
        keeps_all = negated or not self._in_json
        self._at += 1 + negated
        items = []
        while not self._pattern.startswith("]", self._at):
            if self._at >= len(self._pattern) or self._pattern.startswith("[:", self._at):
                self._refuse("a class that is not closed, or one of POSIX,")
            low = self._atom()
            high = self._range_end() if len(low) == 1 else None
            if len(low) > 1:
                items.append(low)
            elif low == "^" and high is not None:
                self._refuse("a range that begins with '^'")
            elif high is not None and (keeps_all or high >= " "):
                items.append(f"{_escaped(low)}-{_escaped(high)}")
            elif high is None and (keeps_all or not _is_unsafe(low)):
                items.append(_escaped(low))
        self._at += 1
        if not items:
            self._refuse(f"{self._pattern[start : self._at]}, a class that nothing matches,")
        items = sorted(dict.fromkeys(items), key=lambda item: item == _CARET)
        return "[" + "^" * negated + "".join(items) + "]" if negated or items != [_CARET] else _CARET

    def _range_end(self) -> str | None:
        rest = self._pattern[self._at : self._at + 2]
        if len(rest) < 2 or rest[0] != "-" or rest[1] == "]":
            return None
        self._at += 1
        high = self._atom()
        if len(high) > 1:
            self._refuse("a range that ends in a set")
        return high

    def _open_group(self) -> str:
        if not self._pattern.startswith("(?", self._at):
            self._at += 1
            return "("
        group = _GROUP.match(self._pattern, self._at)
        if group is None:
            self._refuse(f"'{self._pattern[self._at : self._at + 3]}'")
        self._at = group.end()
        return "(?:"

    def _skip_anchor(self, anchor: str, depth: int) -> None:
        """The whole text is matched anyway: an anchor at the end of an outermost alternative says nothing new."""
        self._at += 1
        beside = self._pattern[self._at - 2 : self._at - 1] if anchor == "^" else self._pattern[self._at : self._at + 1]
        if depth > 0 or beside not in ("", "|"):
            self._refuse(f"'{anchor}' in the middle")

    def _refuse(self, what: str) -> NoReturn:
        raise RequestError(
            "unsupported_regex",
            f"The pattern {self._pattern[:100]!r} has {what} at position {self._at}.",
            "Write it with characters, classes, groups, alternatives and repetitions alone.",
        )


def _is_unsafe(character: str) -> bool:
    """A JSON string holds it only in an escaped form."""
    return character in '"\\' or character < " "


def _escaped(character: str) -> str:
    if character < " ":
        return f"\\u{ord(character):04x}"
    return f"\\{character}" if character in _META else character
