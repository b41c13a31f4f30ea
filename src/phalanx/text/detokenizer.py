"""Tokens to text while they come, and the end of it at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"


class Detokenizer:
    """Decodes a growing list of tokens piece by piece.

    A token can end inside a character (bytes): a piece is held back while it does. With some tokenizers a token's text
    depends on the one before (spaces): there each piece is decoded together with the piece before it.
    """

    def __init__(self, tokenizer: Tokenizer, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._stand_alone = tokenizer.tokens_stand_alone
        self._piece_before: list[int] = []
        self._unfinished: list[int] = []

    def add(self, token: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        self._unfinished.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back, unfinished as it is."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        known = self._tokenizer.decode(self._piece_before, self._keep_special) if self._piece_before else ""
        longer = self._tokenizer.decode(self._piece_before + self._unfinished, self._keep_special)
        if len(longer) <= len(known) or (longer.endswith(_UNFINISHED) and not final):
            return ""
        if not self._stand_alone:
            self._piece_before = self._unfinished
        self._unfinished = []
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
        if not self._stops:
            return piece, False
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
