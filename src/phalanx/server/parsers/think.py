"""Reasoning between `<think>` and `</think>`: Qwen3, DeepSeek R1."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from phalanx.server.markup import END_THINK, THINK
from phalanx.server.parsers.delta import Writer
from phalanx.server.parsers.state_machine import StateMachine, Tags, skip_space, word_at


class ThinkParser(StateMachine):
    """Splits the thought from the text after it, which it hands on to `after`.

    The thought is only ever at the start. With `thinking` True the prompt has opened it; None (unknown) means the same,
    as these models think unless told not to. A `<think>` that the model writes first is then no part of it. With False
    the output is content, unless it begins with `<think>`. A thought that is never closed is reasoning to the end of
    the text: the answer was cut off before it began.
    """

    special_tags: ClassVar[bool] = False
    ends_at_call: ClassVar[bool]
    """Whether a tool call's opening tag ends the thought."""

    def __init__(
        self, writer: Writer, after: Callable[[str], None], call_tag: str | None, thinking: bool | None
    ) -> None:
        super().__init__(self._start)
        self.in_thought = thinking is not False
        self._writer = writer
        self._after = after
        self._ends = Tags(END_THINK, call_tag) if call_tag and self.ends_at_call else Tags(END_THINK)

    def _start(self, text: str, at: int, final: bool) -> int:
        at = skip_space(text, at)
        tag = word_at(text, at, (THINK,), final)
        if tag is None:
            return at
        self.in_thought = self.in_thought or tag == THINK
        self._state = self._thought if self.in_thought else self._rest
        return at + len(tag)

    def _thought(self, text: str, at: int, final: bool) -> int:
        end, tag = self._ends.find(text, at, final)
        self._writer.think(text[at:end])
        if tag:
            self.in_thought = False
            self._state = self._rest
        return end + len(tag) if tag == END_THINK else end

    def _rest(self, text: str, at: int, final: bool) -> int:
        if at < len(text):
            self._after(text[at:])
        return len(text)


class Qwen3(ThinkParser):
    """A `<tool_call>` inside the thought ends it."""

    ends_at_call = True


class DeepSeekR1(ThinkParser):
    """Only `</think>` ends the thought."""

    ends_at_call = False
