"""ParseError, and what all readers of nvidia-smi's text begin with."""

from __future__ import annotations

import re

from phalanx.errors import PhalanxError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"[^\S \t\n]|[\x00-\x08\x0e-\x1f\x7f\ufffd]")
_MOST_CHARACTERS = 2**20


class ParseError(PhalanxError):
    """The text is not what the command prints, or is damaged: nothing is taken from it."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__("unreadable_output", f"{source} cannot be understood: {reason}.", "")
        self.reason = reason


def lines_of(command: str, text: str) -> list[str]:
    """The lines of a command's output.

    Colours and underlines, which a terminal gets, are taken out. Any other control character is damage.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ParseError(command, "it is longer than a million characters")
    plain = _COLOUR.sub("", text.replace("\r\n", "\n"))
    if damage := _CONTROL.search(plain):
        raise ParseError(command, f"it holds the control character {damage[0]!r}")
    return plain.split("\n")


def whole_number(text: str) -> int | None:
    """A count of at most 18 digits, and nothing else."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
