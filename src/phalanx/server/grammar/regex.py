"""Regular expressions, in the dialect that can be enforced exactly."""

from __future__ import annotations

import re
from typing import NoReturn

from phalanx.errors import RequestError

_GROUP = re.compile(r"\(\?(:|P?<[A-Za-z_]\w*>)")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_SETS = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
_LINE_ENDS = r"\n\r\u2028\u2029"
_ESCAPED_IN_JSON = r'"\\\u0000-\u001f'
_OPTIONAL = "{0,1}"
_CARET = r"\^"
_META = "\\^$.|?*+()[]{}-/"


def to_xgrammar(pattern: str, in_json: bool = False) -> str:
    """The pattern for xgrammar, which matches the whole text; or, for JSON, the whole string between the quotes.

    xgrammar reads some constructs otherwise than others do, without a word: anchors in the middle, unknown escapes, a
    dot before a line end, in JSON also optional groups and characters that must be escaped there. These are translated
    or refused here; a string in JSON goes without such characters. `\\d`, `\\w` and `\\s` are those of ASCII.
    """
    return _Translation(pattern, in_json).run()


class _Translation:
    def __init__(self, pattern: str, in_json: bool) -> None:
        self._pattern = pattern
        self._in_json = in_json
        self._never = _ESCAPED_IN_JSON if in_json else ""
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
            elif character == "?":
                out.append(self._question(out))
            elif character in "|)*+{}":
                depth -= character == ")"
                self._at += 1
                out.append(character)
            elif character == ".":
                self._at += 1
                out.append(f"[^{_LINE_ENDS}{self._never}]")
            else:
                out.append(self._outside_class(self._atom()))
        return "".join(out)

    def _atom(self) -> str:
        """The next character, or a backslash and the letter of a set."""
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
        if not escaped or (escaped.isalnum() and escaped.lower() not in _SETS and escaped not in _CONTROLS):
            self._refuse(f"the escape \\{escaped}")
        self._at += 2
        return f"\\{escaped}" if escaped.lower() in _SETS else _CONTROLS.get(escaped, escaped)

    def _outside_class(self, atom: str) -> str:
        if len(atom) == 1:
            if self._in_json and _is_escaped_in_json(atom):
                self._refuse(f"{atom!r}, which must be escaped in JSON,")
            return _escaped(atom)
        inside = _SETS[atom[1].lower()]
        return f"[{inside}]" if atom[1].islower() else f"[^{inside}{self._never}]"

    def _class(self) -> str:
        """A class; sets of what is not a digit or the like stand beside it as classes of their own.

        xgrammar takes even an escaped caret for a negation where it comes first.
        """
        negated = self._pattern.startswith("[^", self._at)
        self._at += 1 + negated
        items: list[str] = [self._never] if negated else []
        beside: list[str] = []
        while not self._pattern.startswith("]", self._at):
            if self._at >= len(self._pattern) or self._pattern.startswith("[:", self._at):
                self._refuse("a class that is not closed, or one of POSIX,")
            atom = self._atom()
            if len(atom) == 1:
                items += self._range(atom, negated)
            elif atom[1].islower():
                items.append(_SETS[atom[1]])
            elif negated:
                self._refuse(f"{atom} in a negated class")
            else:
                beside.append(self._outside_class(atom))
        self._at += 1
        items = sorted(dict.fromkeys(items), key=lambda item: item == _CARET)
        if any(items):
            beside.append("[" + "^" * negated + "".join(items) + "]" if negated or items != [_CARET] else _CARET)
        if not beside:
            self._refuse("a class that nothing matches")
        return beside[0] if len(beside) == 1 else f"(?:{'|'.join(beside)})"

    def _range(self, low: str, negated: bool) -> list[str]:
        """One character or all up to another; in JSON without those that must be escaped, unless they are excluded."""
        high, rest = low, self._pattern[self._at : self._at + 2]
        if len(rest) == 2 and rest[0] == "-" and rest[1] != "]":
            self._at += 1
            high = self._atom()
            if len(high) > 1 or low == "^" or high < low:
                self._refuse("a range of no characters, or one that begins with '^',")
        if negated or not self._in_json:
            return [_span(low, high)]
        parts, start = [], max(low, " ")
        for gap in ('"', "\\"):
            if start <= gap <= high:
                parts.append((start, chr(ord(gap) - 1)))
                start = chr(ord(gap) + 1)
        return [_span(first, last) for first, last in [*parts, (start, high)] if first <= last]

    def _open_group(self) -> str:
        if not self._pattern.startswith("(?", self._at):
            self._at += 1
            return "("
        group = _GROUP.match(self._pattern, self._at)
        if group is None:
            self._refuse(f"'{self._pattern[self._at : self._at + 3]}'")
        self._at = group.end()
        return "(?:"

    def _question(self, out: list[str]) -> str:
        """Once or not at all, which xgrammar gets right in this form; behind a repetition it changes nothing."""
        self._at += 1
        return "" if out and out[-1] in ("*", "+", "}", _OPTIONAL) else _OPTIONAL

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


def _is_escaped_in_json(character: str) -> bool:
    return character in '"\\' or character < " "


def _span(low: str, high: str) -> str:
    return _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}"


def _escaped(character: str) -> str:
    if character < " ":
        return f"\\u{ord(character):04x}"
    return f"\\{character}" if character in _META else character
