"""AnswerText: from the tokens of an answer to the text its reader sees, for `LLM` and the server alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.text.detokenizer import Detokenizer, StopStrings
from phalanx.text.tokenizer import Tokenizer


class AnswerText:
    """One answer in the making. The token that ends it is no part of its text, nor is a stop string unless kept."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        ends: Iterable[int] = (),
        keep_special: bool = False,
        keep_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, keep_special)
        self._stops = StopStrings(stops, keep_stop)
        self._ends = frozenset(ends)

    @property
    def met(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.met

    def add(self, token: int, finish_reason: str | None) -> tuple[str, str | None]:
        """New text, and why the answer ends if it does: the engine's reason, or 'stop' at a stop string, which the
        engine knows nothing of. At the end comes all that was held back, in whose last bytes one can still be met.
        """
        text, stopped = "", False
        if finish_reason != "stop" or token not in self._ends:
            text, stopped = self._stops.add(self._detokenizer.add(token))
        if stopped or finish_reason is None:
            return text, "stop" if stopped else None
        rest, stopped = self._stops.add(self._detokenizer.finish())
        return text + rest + self._stops.finish(), "stop" if stopped else finish_reason
