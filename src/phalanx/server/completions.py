"""/v1/completions: from pieces to OpenAI's text completion objects."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.engine.logprobs import TokenLogprobs
from phalanx.server import logprobs
from phalanx.server.answer import Answer, AnswerPiece, GrowingChoice
from phalanx.server.chunks import Chunks
from phalanx.text.tokenizer import Tokenizer

OBJECT = "text_completion"


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET


class CompletionFormat(Chunks):
    """Writes text completions: a chunk and the whole look the same. `echoes` goes before the text of each choice.

    With `echo_logprobs` its log-probabilities do too; `prompt_logprobs` of the likeliest are told on their own.
    """

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        echoes: list[str],
        echo_logprobs: bool = False,
        prompt_logprobs: int | None = None,
        **usage: bool,
    ) -> None:
        super().__init__({"id": id, "created": created, "model": model}, OBJECT, **usage)
        self._echo_logprobs = echo_logprobs
        self._prompt_logprobs = prompt_logprobs
        self._tokenizer = tokenizer
        self._echoes = dict(enumerate(echoes))
        self._lengths = [len(echo) for echo in echoes]

    def body(self, pieces: list[AnswerPiece], answer: Answer) -> dict[str, Any]:
        of_choice = [[piece for piece in pieces if piece.choice == choice.index] for choice in answer.choices]
        choices = [
            self.choice(_joined(choice, some), answer) for choice, some in zip(answer.choices, of_choice, strict=True)
        ]
        return self._head | {"choices": choices, "usage": answer.usage(), "object": OBJECT}

    def choice(self, piece: AnswerPiece, answer: Answer) -> CompletionChoice:
        choice = answer.choices[piece.choice]
        index, prompt, found = choice.index, choice.question.prompt, piece.prompt_logprobs
        is_first, written = index in self._echoes, None
        tokens: list[tuple[int, TokenLogprobs | None]] = [*piece.logprobs]
        if found is not None and self._echo_logprobs:
            tokens[:0] = logprobs.told_of_prompt(prompt, found, choice.question.params.logprobs or 0)
            self._lengths[index] = 0
        if tokens:
            written = logprobs.for_completion(tokens, self._tokenizer, self._lengths[index])
            self._lengths[index] += sum(map(len, written["tokens"]))
        return CompletionChoice(
            index,
            self._echoes.pop(index) + piece.content if is_first else piece.content,
            written,
            piece.finish_reason,
            choice.stop_reason if piece.finish_reason else None,
            piece.tokens or msgspec.UNSET,
            prompt if is_first and choice.question.tell_tokens else msgspec.UNSET,
            logprobs.of_prompt(prompt, found, self._prompt_logprobs, self._tokenizer) or msgspec.UNSET,
        )


def _joined(choice: GrowingChoice, pieces: list[AnswerPiece]) -> AnswerPiece:
    """The whole of a choice as one piece."""
    return AnswerPiece(
        choice.index,
        "".join(piece.content for piece in pieces),
        logprobs=[token for piece in pieces for token in piece.logprobs],
        finish_reason=choice.finish_reason,
        tokens=[token for piece in pieces for token in piece.tokens],
        prompt_logprobs=pieces[0].prompt_logprobs if pieces else None,
    )
