"""/v1/completions: from pieces to OpenAI's text completion objects."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.engine.step_plan import TokenLogprobs
from phalanx.server import logprobs
from phalanx.server.answer import Answer, Piece
from phalanx.text.tokenizer import Tokenizer


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class Completion(msgspec.Struct):
    """A chunk and the whole look the same."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    object: str = "text_completion"


class CompletionFormat:
    """Writes text completions. `echoes` is what goes before the text of each choice."""

    def __init__(self, id: str, created: int, model: str, tokenizer: Tokenizer, echoes: list[str]) -> None:
        self._head: dict[str, Any] = {"id": id, "created": created, "model": model}
        self._tokenizer = tokenizer
        self._echoes = dict(enumerate(echoes))
        self._lengths = [len(echo) for echo in echoes]

    def chunk(self, piece: Piece) -> Completion:
        return self._completion([self._choice(piece.choice, piece.content, piece.logprobs, piece.finish_reason)])

    def usage_chunk(self, usage: dict[str, object]) -> Completion:
        return self._completion([], usage)

    def body(self, pieces: list[Piece], answer: Answer) -> Completion:
        choices = []
        for choice in answer.choices:
            own = [piece for piece in pieces if piece.choice == choice.index]
            text = "".join(piece.content for piece in own)
            tokens = [token for piece in own for token in piece.logprobs]
            choices.append(self._choice(choice.index, text, tokens, choice.finish_reason))
        return self._completion(choices, answer.usage())

    def _choice(
        self, index: int, text: str, tokens: list[tuple[int, TokenLogprobs]], finish_reason: str | None
    ) -> CompletionChoice:
        written = None
        if tokens:
            written = logprobs.for_completion(tokens, self._tokenizer, self._lengths[index])
            self._lengths[index] += sum(map(len, written["tokens"]))
        return CompletionChoice(index, self._echoes.pop(index, "") + text, written, finish_reason)

    def _completion(
        self, choices: list[CompletionChoice], usage: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    ) -> Completion:
        return Completion(**self._head, choices=choices, usage=usage)
