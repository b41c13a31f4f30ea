"""Calls written as JSON objects."""

from __future__ import annotations

from typing import Any

from phalanx.server.parsers.delta import Writer
from phalanx.server.parsers.json_text import Brackets, is_unicode, parse_json, to_json

ARGUMENT_KEYS = ("arguments", "parameters")


class CallObject:
    """One call as a JSON object, `{"name": .., "arguments": {..}}`, read in pieces from its first bracket on.

    Where `name` comes before the arguments, these go out as they come, in the model's own spelling. In any other order
    the object is read when it is complete. `markup` is what announced the object: part of the text if it is no call.
    """

    def __init__(self, writer: Writer, markup: str, arguments_required: bool) -> None:
        self.ended = False
        self.is_call = False
        self.brackets = Brackets()
        self._writer = writer
        self._kept = [markup]
        self._arguments_required = arguments_required
        self._in_arguments = False
        self._may_stream = True

    @property
    def text(self) -> str:
        """What was read and has not gone out."""
        return "".join(self._kept)

    def read(self, text: str, at: int, final: bool) -> int:
        while not self.ended and at < len(text):
            end, bracket = self.brackets.next(text, at)
            if self._in_arguments:
                self._read_arguments(text[at:end], bracket)
            else:
                self._read_around_arguments(text[at:end], bracket)
            at = end
        if final and not self.ended:
            self._end()
        return at

    def _read_around_arguments(self, piece: str, bracket: str) -> None:
        self._kept.append(piece)
        if bracket == "{" and self.brackets.depth == 2 and self._may_stream:
            self._begin_arguments()
        elif bracket == "<" or (bracket and self.brackets.depth == 0):
            self._end()

    def _begin_arguments(self) -> None:
        """The first object inside the object: are these the arguments of a call whose name is known?"""
        self._may_stream = False
        beginning = parse_json("".join(self._kept[1:]) + "}}")
        name = _call_name(beginning)
        if name and list(beginning)[-1] in ARGUMENT_KEYS:
            self.is_call = self._in_arguments = True
            self._kept.clear()
            self._writer.call(name)
            self._writer.argue("{")

    def _read_arguments(self, piece: str, bracket: str) -> None:
        self._writer.argue(piece)
        self._in_arguments = self.brackets.depth > 1
        self.ended = bracket == "<"

    def _end(self) -> None:
        self.ended = True
        if self.is_call:
            if self.brackets.depth:
                self._writer.say(self.text)
        elif self.brackets.depth == 0 and (call := self._whole_call()):
            self.is_call = True
            self._writer.call(call[0])
            self._writer.argue(call[1])

    def _whole_call(self) -> tuple[str, str] | None:
        whole = parse_json("".join(self._kept[1:]))
        name = _call_name(whole)
        if not name:
            return None
        given = [whole[key] for key in ARGUMENT_KEYS if key in whole]
        if not given and self._arguments_required:
            return None
        arguments = _arguments_text(given[0] if given else None)
        return (name, arguments) if arguments else None


def _call_name(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) and is_unicode(name) else None


def _arguments_text(value: Any) -> str | None:
    """An object, nothing, or an object written as JSON text in a string, the way the API itself does."""
    if value is None:
        return "{}"
    if isinstance(value, str) and isinstance(parse_json(value), dict) and is_unicode(value):
        return value
    try:
        return to_json(value) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None
