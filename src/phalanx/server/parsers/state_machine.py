"""What all parsers share: state machines over text in pieces, and tags that may be cut between two pieces."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from phalanx.server.parsers.delta import ToolSchema, Writer

ParserState = Callable[[str, int, bool], int]
"""(text, at, final) -> how far it read. `final` says that nothing follows the text."""

MAX_NAME = 256
"""No tool's or parameter's name is longer."""


class Tags:
    """Finds the first of some tags, and the place where one may be beginning."""

    def __init__(self, *tags: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, tags)))
        self._beginnings = {tag[:length] for tag in tags for length in range(1, len(tag))}
        self._first_characters = re.compile(f"[{re.escape(''.join(tag[0] for tag in tags))}]")
        self._longest = max(map(len, tags))

    def find(self, text: str, at: int, final: bool) -> tuple[int, str]:
        """Where the first tag begins, and the tag. Without one: how far the text is certain to hold no tag, and ""."""
        found = self._pattern.search(text, at)
        if found:
            return found.start(), found.group()
        if not final:
            for first in self._first_characters.finditer(text, max(at, len(text) - self._longest)):
                if text[first.start() :] in self._beginnings:
                    return first.start(), ""
        return len(text), ""


def word_at(text: str, at: int, words: Sequence[str], final: bool) -> str | None:
    """Which of the words stands at `at`: "" if none does, None while the text is too short to tell."""
    for word in words:
        if text.startswith(word, at):
            return word
    rest = text[at : at + max(map(len, words))]
    return None if not final and any(word.startswith(rest) for word in words) else ""


_SPACE = re.compile(r"\s*")


def skip_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def name_at(text: str, at: int, end_of_name: re.Pattern[str], final: bool) -> tuple[int, str | None]:
    """Where the name at `at` ends, and the name: "" if there is none, None while the text is too short to tell."""
    found = end_of_name.search(text, at, at + MAX_NAME + 1)
    if found:
        return found.start(), text[at : found.start()].strip()
    return at, None if len(text) - at <= MAX_NAME and not final else ""


class StateMachine:
    """Runs one state after the other over text in pieces.

    A state reads from `at` and says how far it came; it may name the next state. When it neither moves on nor changes,
    what it left is held and begins the next piece. So a state leaves only what may be part of a tag or a name, which
    bounds the held text and keeps the work linear; with `final` it leaves nothing.
    """

    def __init__(self, start: ParserState) -> None:
        self._state = start
        self._held = ""

    def feed(self, text: str) -> None:
        self._run(self._held + text, final=False)

    def finish(self) -> None:
        self._run(self._held, final=True)

    def _run(self, text: str, final: bool) -> None:
        at = 0
        while final or at < len(text):
            state, before = self._state, at
            at = state(text, at, final)
            if at == before and self._state == state:
                break
        self._held = text[at:]


class ToolParser(StateMachine, ABC):
    """Splits text into content and calls.

    Text that may become a call is gathered; if it does not, it goes out as content, every character of it. What has
    gone out as a call stays one, even if its arguments turn out to be broken: they are given as the model wrote them.
    """

    special_tags: ClassVar[bool]
    """Whether tags are special tokens, which decoding must then keep."""
    opening: ClassVar[str]
    """The tag that announces calls."""

    def __init__(self, writer: Writer, schemas: Sequence[ToolSchema]) -> None:
        super().__init__(self._outside)
        self._writer = writer
        self._schemas = {schema.name: schema.parameters for schema in schemas}
        self._gathered: list[str] = []
        self._end_tag_due = False

    @abstractmethod
    def _outside(self, text: str, at: int, final: bool) -> int:
        """The state outside calls."""

    def _say_until(self, tags: Tags, text: str, at: int, final: bool) -> tuple[int, str]:
        """Give out content up to a tag; where the tag ends, and the tag."""
        end, tag = tags.find(text, at, final)
        self._writer.say(text[at:end])
        return end + len(tag), tag

    def _open(self, tag: str, next_state: ParserState) -> None:
        """A tag that may begin a call."""
        self._gathered.append(tag)
        self._end_tag_due = False
        self._state = next_state

    def _drop_end_tag(self, tag: str, last: bool = True) -> None:
        """A call's end tag is dropped; one that ends nothing is content."""
        if not self._end_tag_due:
            self._writer.say(tag)
        elif last:
            self._end_tag_due = False

    def _gather_space(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        self._gathered.append(text[at:end])
        return end

    def _take_gathered(self) -> str:
        gathered = "".join(self._gathered)
        self._gathered.clear()
        return gathered

    def _give_up(self, next_state: ParserState) -> None:
        """What was gathered is no call."""
        self._writer.say(self._take_gathered())
        self._state = next_state
