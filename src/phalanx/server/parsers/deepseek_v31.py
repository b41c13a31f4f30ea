"""DeepSeek V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{..}<｜tool▁call▁end｜>`, in `<｜tool▁calls▁begin｜>`.."""

# ruff: noqa: RUF002 (the bars are the model's own)

from __future__ import annotations

import re

from phalanx.server import markup
from phalanx.server.parsers.json_text import Brackets
from phalanx.server.parsers.state_machine import Tags, ToolParser, name_at, word_at

CALLS, END_CALLS = markup.DEEPSEEK_CALLS, markup.DEEPSEEK_END_CALLS
CALL, END_CALL = markup.DEEPSEEK_CALL, markup.DEEPSEEK_END_CALL
_TAGS = Tags(CALLS, CALL, END_CALL, END_CALLS)
_END_OF_NAME = re.compile(r"[<\n]")


class DeepSeekV31(ToolParser):
    """A call ends with its arguments object; end tags, and the tags around all calls, may be missing."""

    special_tags = True
    opening = CALLS

    def _outside(self, text: str, at: int, final: bool) -> int:
        at, tag = self._say_until(_TAGS, text, at, final)
        if tag == CALLS:
            self._open(tag, self._opened)
        elif tag == CALL:
            self._open(tag, self._name)
        elif tag:
            self._drop_end_tag(tag, last=tag == END_CALLS)
        return at

    def _opened(self, text: str, at: int, final: bool) -> int:
        at = self._gather_space(text, at)
        tag = word_at(text, at, (CALL,), final)
        if tag is None:
            return at
        if tag:
            self._open(tag, self._name)
        else:
            self._give_up(self._outside)
        return at + len(tag)

    def _name(self, text: str, at: int, final: bool) -> int:
        end, name = name_at(text, at, _END_OF_NAME, final)
        separator = word_at(text, end, (markup.DEEPSEEK_SEPARATOR,), final) if name else name
        if name and separator:
            self._called = name
            self._gathered.append(text[at:end] + separator)
            self._state = self._before_arguments
            return end + len(separator)
        if separator == "":
            self._give_up(self._outside)
        return at

    def _before_arguments(self, text: str, at: int, final: bool) -> int:
        at = self._gather_space(text, at)
        if text.startswith("{", at):
            self._gathered.clear()
            self._brackets = Brackets()
            self._writer.call(self._called)
            self._state = self._arguments
        elif final or at < len(text):
            self._give_up(self._outside)
        return at

    def _arguments(self, text: str, at: int, final: bool) -> int:
        end, bracket = self._brackets.next(text, at)
        self._writer.argue(text[at:end])
        if bracket == "<" or self._brackets.depth == 0:
            self._end_tag_due = True
            self._state = self._outside
        return end
