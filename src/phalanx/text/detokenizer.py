"""Tokens to text while they come, and the end of it at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"


class Detokenizer:
    """Decodes a growing list of tokens piece by piece.

    A token's text can depend on the one before (spaces) and can end inside a character (bytes). So each piece is
    decoded together with the piece before it, and held back while it ends in an unfinished character. Tokens up to
    `_emitted` are out; those from `_context` on are decoded again for what they say about the next.
    """

    def __init__(self, tokenizer: Tokenizer, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._tokens: list[int] = []
        self._context = 0
        self._emitted = 0

    def add(self, token: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        self._tokens.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back, unfinished as it is."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        known = self._tokenizer.decode(self._tokens[self._context : self._emitted], self._keep_special)
        longer = self._tokenizer.decode(self._tokens[self._context :], self._keep_special)
        if len(longer) <= len(known) or (longer.endswith(_UNFINISHED) and not final):
            return ""
        self._context, self._emitted = self._emitted, len(self._tokens)
        return longer[len(known) :]


class StopStrings:
    """Cuts a growing text at the stop string that is complete first, and holds back any end that could begin one.

    `met` is the stop string that ended it. It is dropped, or with `keep` the last of the text.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self.met: str | None = None
        self._stops = stops
        self._keep = keep
        self._held = ""

    def add(self, piece: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was met (what follows it is dropped)."""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, start, self.met = min(found)
            return text[: end if self._keep else start], True
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of the text that is a beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held
