"""Llama 3: `{"name": .., "parameters": {..}}`, maybe after `<|python_tag|>`, several joined by `; `."""

from __future__ import annotations

from phalanx.server.markup import PYTHON_TAG
from phalanx.server.parsers.json_call import ARGUMENT_KEYS, CallObject
from phalanx.server.parsers.state_machine import Tags, ToolParser, word_at

_OPENINGS = Tags("{", PYTHON_TAG)
_FIRST_KEYS = tuple(f'"{key}"' for key in ("name", *ARGUMENT_KEYS, "type"))


class Llama3Json(ToolParser):
    """A call may stand anywhere in the text, but an object must have both a name and arguments to be one.

    Objects that begin with another key are content with all that is in them, and are not held back.
    """

    special_tags = True
    opening = PYTHON_TAG

    def _outside(self, text: str, at: int, final: bool) -> int:
        at, opening = self._say_until(_OPENINGS, text, at, final)
        if opening == "{":
            self._open_object()
        elif opening:
            self._open(opening, self._tagged)
        return at

    def _tagged(self, text: str, at: int, final: bool) -> int:
        at = self._gather_space(text, at)
        if text.startswith("{", at):
            self._open_object()
            return at + 1
        if final or at < len(text):
            self._give_up(self._outside)
        return at

    def _open_object(self) -> None:
        self._object = CallObject(self._writer, self._take_gathered(), arguments_required=True)
        self._object.read("{", 0, final=False)
        self._state = self._first_key

    def _first_key(self, text: str, at: int, final: bool) -> int:
        start = self._gather_space(text, at)
        key = word_at(text, start, _FIRST_KEYS, final)
        if key == "":
            self._writer.say(self._object.text)
            self._give_up(self._other_object if text.startswith('"', start) else self._outside)
        elif key:
            self._object.read(self._take_gathered(), 0, final=False)
            self._state = self._inside
        return start

    def _inside(self, text: str, at: int, final: bool) -> int:
        at = self._object.read(text, at, final)
        if self._object.ended:
            if not self._object.is_call:
                self._writer.say(self._object.text)
            self._state = self._separator if self._object.is_call else self._outside
        return at

    def _other_object(self, text: str, at: int, final: bool) -> int:
        end, bracket = self._object.brackets.next(text, at)
        self._writer.say(text[at:end])
        if bracket == "<" or self._object.brackets.depth == 0:
            self._state = self._outside
        return end

    def _separator(self, text: str, at: int, final: bool) -> int:
        at = self._gather_space(text, at)
        if final or at < len(text):
            self._give_up(self._outside)
        return at + 1 if text.startswith(";", at) else at
