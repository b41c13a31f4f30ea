"""What the parsers give out: deltas, and the writer that makes them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

import msgspec


class ToolSchema(msgspec.Struct, frozen=True):
    """A tool the client offers: its name and the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of one call: `id` and `name` in its first delta only, then the next piece of the arguments' JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class Delta(msgspec.Struct, frozen=True):
    """What a piece of text added; falsy when it added nothing."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class _Words:
    """A text in pieces whose whitespace waits for the word that follows it."""

    def __init__(self) -> None:
        self.begun = False
        self._space: list[str] = []
        self._enough_space = False

    def add(self, piece: str, strip_start: bool) -> str:
        if self._enough_space:
            piece = piece.lstrip()
        if not piece:
            return ""
        upto_last_word = piece.rstrip()
        if not upto_last_word:
            self._space.append(piece)
            return ""
        text = "".join((*self._space, upto_last_word))
        self._space = [piece[len(upto_last_word) :]]
        self._enough_space = False
        if strip_start and not self.begun:
            text = text.lstrip()
        self.begun = True
        return text

    def interrupt(self) -> None:
        """Markup stands here: if there is whitespace before it, that after it is dropped."""
        self._enough_space = any(self._space)

    def space(self) -> str:
        return "".join(self._space)


class Writer:
    """Takes what the parsers read, in the order they read it, and gives it out as deltas.

    Whitespace that only surrounds markup is dropped: at both ends of a thought, in content before the first word when a
    thought or a call came first, at the end of content when there was a call, and after a call where there is some
    before it. `thought_end` is the tag that closes thoughts where the output may have one: met again before the first
    word of content, it is dropped too.
    """

    def __init__(self, thought_end: str | None, new_id: Callable[[], str]) -> None:
        self._thought_end = thought_end
        self._before_content = re.compile(rf"(?:\s|{re.escape(thought_end)})*+" if thought_end else "")
        self._maybe_thought_end = ""
        self._new_id = new_id
        self._num_calls = 0
        self._thought_words = _Words()
        self._content_words = _Words()
        self._clear()

    def _clear(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[int, str | None, str | None, list[str]]] = []

    def think(self, text: str) -> None:
        self._reasoning.append(self._thought_words.add(text, strip_start=True))

    def say(self, text: str) -> None:
        if self._thought_end and not self._content_words.begun:
            text = self._maybe_thought_end + text
            leading = self._before_content.match(text)
            text = text[leading.end() :] if leading else text
            if self._thought_end.startswith(text):
                self._maybe_thought_end = text
                return
            self._maybe_thought_end = ""
        strip_start = self._thought_end is not None or self._num_calls > 0
        self._content.append(self._content_words.add(text, strip_start))

    def call(self, name: str) -> None:
        """A call begins; its arguments follow."""
        self._say_what_was_no_tag()
        self._content_words.interrupt()
        self._calls.append((self._num_calls, self._new_id(), name, []))
        self._num_calls += 1

    def argue(self, json_text: str) -> None:
        """The next piece of the arguments of the call that began last."""
        if not json_text:
            return
        if not self._calls:
            self._calls.append((self._num_calls - 1, None, None, []))
        self._calls[-1][3].append(json_text)

    def take(self) -> Delta:
        """All that came since it was last taken."""
        calls = tuple(ToolCallDelta(index, id, name, "".join(pieces)) for index, id, name, pieces in self._calls)
        delta = Delta("".join(self._content), "".join(self._reasoning), calls)
        self._clear()
        return delta

    def finish(self, cut: bool = False) -> None:
        """The text is over: whitespace that waits is content unless it only follows markup."""
        if not cut:
            self._say_what_was_no_tag()
        if not self._num_calls and (self._content_words.begun or not self._thought_end):
            self._content.append(self._content_words.space())

    def _say_what_was_no_tag(self) -> None:
        if self._maybe_thought_end:
            self._content.append(self._content_words.add(self._maybe_thought_end, strip_start=True))
            self._maybe_thought_end = ""
