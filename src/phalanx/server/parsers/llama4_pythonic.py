"""Llama 4: `[f(a=1, b="x"), g()]`, maybe between `<|python_start|>` and `<|python_end|>`."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Any

from phalanx.server.markup import PYTHON_END, PYTHON_START
from phalanx.server.parsers.delta import ToolSchema, Writer
from phalanx.server.parsers.json_text import to_json
from phalanx.server.parsers.state_machine import Tags, ToolParser, name_at

_TAGS = Tags(PYTHON_START, PYTHON_END)
_NAME_START = re.compile(r"[^\W\d]")
_END_OF_NAME = re.compile(r"[^\w.-]")


class Llama4Pythonic(ToolParser):
    """Calls are a list at the start of the text or after `<|python_start|>`; each goes out when it is complete.

    Arguments are named literals. A list that stops being one of calls is content from the end of its last call on.
    """

    special_tags = True
    opening = PYTHON_START

    def __init__(self, writer: Writer, schemas: Sequence[ToolSchema]) -> None:
        super().__init__(writer, schemas)
        self._state = self._before_list

    def _outside(self, text: str, at: int, final: bool) -> int:
        at, tag = self._say_until(_TAGS, text, at, final)
        if tag == PYTHON_START:
            self._open(tag, self._before_list)
        elif tag == PYTHON_END:
            self._drop_end_tag(tag)
        return at

    def _before_list(self, text: str, at: int, final: bool) -> int:
        at = self._gather_space(text, at)
        if text.startswith("[", at):
            self._gathered.append("[")
            self._state = self._before_call
            return at + 1
        if final or at < len(text):
            self._give_up(self._outside)
        return at

    def _before_call(self, text: str, at: int, final: bool) -> int:
        at = self._gather_space(text, at)
        if _NAME_START.match(text, at):
            self._state = self._name
        elif final or at < len(text):
            self._give_up(self._outside)
        return at

    def _name(self, text: str, at: int, final: bool) -> int:
        end, name = name_at(text, at, _END_OF_NAME, final)
        if name and text[end] == "(":
            self._called = name
            self._gathered.append(name)
            self._argument_pieces: list[str] = []
            self._brackets = _PythonBrackets()
            self._state = self._arguments
            return end
        if name is not None:
            self._give_up(self._outside)
        return at

    def _arguments(self, text: str, at: int, final: bool) -> int:
        end, bracket = self._brackets.next(text, at, final)
        self._argument_pieces.append(text[at:end])
        self._gathered.append(text[at:end])
        if bracket and self._brackets.depth == 0:
            self._end_call()
        elif final and end == len(text):
            self._give_up(self._outside)
        return end

    def _end_call(self) -> None:
        arguments = _arguments_json("".join(self._argument_pieces))
        if arguments is None:
            self._give_up(self._outside)
            return
        self._gathered.clear()
        self._writer.call(self._called)
        self._writer.argue(arguments)
        self._end_tag_due = True
        self._state = self._after_call

    def _after_call(self, text: str, at: int, final: bool) -> int:
        at = self._gather_space(text, at)
        if text.startswith(",", at):
            self._gathered.append(",")
            self._state = self._before_call
            return at + 1
        if text.startswith("]", at):
            self._gathered.clear()
            self._state = self._outside
            return at + 1
        if final or at < len(text):
            self._give_up(self._outside)
        return at


_OUTSIDE_STRINGS = re.compile(r"""['"()\[\]{}]""")
_INSIDE_STRINGS = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in ("'", '"', "'''", '"""')}


class _PythonBrackets:
    """Finds the brackets of Python text in pieces, and their depth."""

    def __init__(self) -> None:
        self.depth = 0
        self._quote = ""

    def next(self, text: str, at: int, final: bool) -> tuple[int, str]:
        """Just past the next bracket outside strings, and the bracket. Without one: how far that is certain, and ""."""
        while found := self._next_mark(text, at):
            mark, at = found.group(), found.end()
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "'\"":
                three = text[found.start() : found.start() + 3]
                if len(three) < 3 and not three.strip(mark) and not final:
                    return found.start(), ""
                self._quote = three if three == mark * 3 else mark
                at = found.start() + len(self._quote)
            else:
                self.depth += 1 if mark in "([{" else -1
                return at, mark
        return len(text) - (0 if final else self._possible_mark(text, at)), ""

    def _next_mark(self, text: str, at: int) -> re.Match[str] | None:
        return (_INSIDE_STRINGS[self._quote] if self._quote else _OUTSIDE_STRINGS).search(text, at)

    def _possible_mark(self, text: str, at: int) -> int:
        """Length of the end of the text that may begin an escape or the end of a string."""
        if not self._quote:
            return 0
        if text.endswith("\\", at):
            return 1
        rest = text[max(at, len(text) - 2) :]
        return len(rest) - len(rest.rstrip(self._quote[0]))


def _arguments_json(text: str) -> str | None:
    """`(a=1, b="x")` as a JSON object; None if these are not named literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning about an odd escape in a string is not for us
            call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        return to_json({keyword.arg: _literal(keyword.value) for keyword in call.keywords})
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


_JSON_WORDS = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal, JSON's own words among them. ValueError for anything else."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=("true" | "false" | "null") as word):
            return _JSON_WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError(f"{type(node).__name__} is no literal.")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
    raise ValueError("A key is no string.")
