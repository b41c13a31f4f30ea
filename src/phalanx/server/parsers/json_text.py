"""JSON text: where its objects end, reading it without trust, writing it so that it can be sent."""

from __future__ import annotations

import json
import re
from typing import Any

_OUTSIDE_STRINGS = re.compile(r'["{}\[\]<]')
_INSIDE_STRINGS = re.compile(r'"|\\.?', re.DOTALL)


class Brackets:
    """Finds the brackets of JSON text in pieces, and their depth.

    It does not check the JSON. A `<` outside strings is never JSON, so it counts as the end of a broken object: the tag
    that the model wrote instead of the missing brackets.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = False
        self._escaped = False

    def next(self, text: str, at: int) -> tuple[int, str]:
        """Just past the next bracket outside strings, and the bracket; "" at the text's end. A `<` is not passed."""
        if self._escaped:
            self._escaped = False
            at += 1
        while found := (_INSIDE_STRINGS if self._in_string else _OUTSIDE_STRINGS).search(text, at):
            mark, at = found.group(), found.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = mark == "\\"
            elif mark == "<":
                return found.start(), mark
            else:
                self.depth += 1 if mark in "{[" else -1
                return at, mark
        return len(text), ""


def parse_json(text: str) -> Any:
    """The value; None if the text is no JSON, nests too deep or holds numbers that are none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON.")


def is_unicode(text: str) -> bool:
    """Whether it can be sent: an escape like `\\ud800` makes half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_json(value: Any) -> str:
    """JSON text that can be sent, readable where possible. ValueError for numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value)
