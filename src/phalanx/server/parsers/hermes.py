"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, repeated."""

from __future__ import annotations

from phalanx.server.markup import CALL, END_CALL
from phalanx.server.parsers.json_call import CallObject
from phalanx.server.parsers.state_machine import Tags, ToolParser

_TAGS = Tags(CALL, END_CALL)


class Hermes(ToolParser):
    """The end tag may be missing: a call ends with its JSON object. A call without arguments has empty ones."""

    special_tags = False
    opening = CALL

    def _outside(self, text: str, at: int, final: bool) -> int:
        at, tag = self._say_until(_TAGS, text, at, final)
        if tag == CALL:
            self._open(tag, self._opened)
        elif tag == END_CALL:
            self._drop_end_tag(tag)
        return at

    def _opened(self, text: str, at: int, final: bool) -> int:
        at = self._gather_space(text, at)
        if text.startswith("{", at):
            self._call = CallObject(self._writer, self._take_gathered(), arguments_required=False)
            self._state = self._inside
        elif final or at < len(text):
            self._give_up(self._outside)
        return at

    def _inside(self, text: str, at: int, final: bool) -> int:
        at = self._call.read(text, at, final)
        if self._call.ended:
            if not self._call.is_call:
                self._writer.say(self._call.text)
            self._end_tag_due = self._call.is_call
            self._state = self._outside
        return at
