"""Answer: from the engine's tokens to what the client is told of each choice."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phalanx.engine.logprobs import PromptLogprobs, TokenLogprobs
from phalanx.engine.output import NO_TOKEN
from phalanx.engine.sampling import SamplingParams
from phalanx.server.engine_client import EngineClient
from phalanx.server.fields import MAX_TOOLS
from phalanx.server.mailbox import Mailbox
from phalanx.server.messages import NewToken
from phalanx.server.parsers import OutputParser, ToolCallDelta
from phalanx.text.answer import AnswerText
from phalanx.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Question:
    """A prompt and how to answer it. `parser` makes the parser of one choice; without one, text stays as it is.

    Of the tool calls a model makes at once, `most_calls` are passed on. `keep_special` and `keep_stop` leave special
    tokens and the stop string in the text. Owners share the engine in equal parts.
    """

    prompt: list[int]
    params: SamplingParams
    salt: str | None = None
    grammar: bytes | None = None
    parser: Callable[[], OutputParser] | None = None
    most_calls: int = MAX_TOOLS
    keep_special: bool = False
    keep_stop: bool = False
    tell_tokens: bool = False
    owner: str = ""
    adapter: str | None = None
    write_embedding: Callable[[bytes], msgspec.Raw] | None = None


class AnswerPiece(msgspec.Struct):
    """What is new in a choice since the piece before, and by which tokens where the question asks for them.

    The first one has what was asked about the prompt.
    """

    choice: int
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
    logprobs: list[tuple[int, TokenLogprobs]] = []
    finish_reason: str | None = None
    tokens: list[int] = []
    prompt_logprobs: PromptLogprobs | None = None
    embedding: msgspec.Raw | None = None

    def __bool__(self) -> bool:
        told = self.content or self.reasoning or self.tool_calls or self.logprobs or self.finish_reason or self.tokens
        return bool(told) or self.prompt_logprobs is not None


class Listener(Protocol):
    """Hears of tokens as they come: metrics."""

    def first_token(self, after_s: float) -> None: ...

    def next_token(self, after_s: float) -> None: ...


class GrowingChoice:
    """One answer in the making: token by token through detokeniser, stop strings and parser."""

    def __init__(self, index: int, question: Question, tokenizer: Tokenizer, stop_tokens: Sequence[int]) -> None:
        self.index = index
        self.question = question
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.output_tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.drafted = (0, 0)
        self.queued_s = 0.0
        self.first_at: float | None = None
        self.last_at: float | None = None
        self._parser = question.parser() if question.parser is not None else None
        self._text = AnswerText(
            tokenizer,
            question.params.stop,
            ends=(*stop_tokens, *question.params.stop_token_ids),
            keep_special=question.keep_special or (self._parser is not None and self._parser.needs_special_tokens),
            keep_stop=question.keep_stop,
        )
        self._called = False

    def add(self, token: NewToken, piece: AnswerPiece) -> None:
        """Book a token. A stop string may end the choice before the engine does."""
        self.cached_tokens, self.queued_s, self.drafted = token.cached_tokens, token.queued_s, token.drafted
        if token.prompt_logprobs is not None:
            piece.prompt_logprobs = token.prompt_logprobs
        if token.token == NO_TOKEN:
            if token.embedding is not None and self.question.write_embedding is not None:
                piece.embedding = self.question.write_embedding(token.embedding)
            self.finish_reason = piece.finish_reason = token.finish_reason
            return
        self.output_tokens += 1
        if self._parser is not None and self._parser.in_reasoning:
            self.reasoning_tokens += 1
        if token.logprobs is not None:
            piece.logprobs.append((token.token, token.logprobs))
        if self.question.tell_tokens:
            piece.tokens.append(token.token)
        text, self.finish_reason = self._text.add(token.token, token.finish_reason)
        if self.finish_reason == "stop":
            asked_for = token.token in self.question.params.stop_token_ids
            self.stop_reason = self._text.met or (token.token if asked_for else None)
        self._tell(text, piece)

    def _tell(self, text: str, piece: AnswerPiece) -> None:
        if self._parser is None:
            piece.content += text
        else:
            deltas = [self._parser.feed(text)]
            if self.finish_reason is not None:
                deltas.append(self._parser.finish(cut=self.finish_reason == "length"))
            for delta in deltas:
                piece.content += delta.content
                piece.reasoning += delta.reasoning
                piece.tool_calls += [call for call in delta.tool_calls if call.index < self.question.most_calls]
            self._called = self._called or bool(piece.tool_calls)
        if self.finish_reason == "stop" and self._called:
            self.finish_reason = "tool_calls"
        piece.finish_reason = self.finish_reason


class Answer:
    """The choices of all questions of one HTTP request, `n` for each, numbered through.

    The engine has `at_once` of them at a time, or all.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        stop_tokens: Sequence[int],
        listener: Listener,
        at_once: int | None = None,
    ) -> None:
        self.questions = questions
        self.mailbox = Mailbox()
        self.arrived = time.perf_counter()
        self.asked = False
        self._listener = listener
        self._at_once = at_once
        self._ended = 0
        self.choices = [
            GrowingChoice(index, question, tokenizer, stop_tokens)
            for index, question in enumerate(question for question in questions for _ in range(question.params.n))
        ]

    async def pieces(self, engine: EngineClient) -> AsyncGenerator[list[AnswerPiece], None]:
        """Ask the engine and pass on what comes. However this ends, nothing goes on running behind it."""
        ids: list[int] = []
        self.asked = True
        try:
            while self._ended < len(self.choices):
                most = len(self.choices) if self._at_once is None else self._ended + self._at_once
                while len(ids) < min(len(self.choices), most):
                    ids.append(self._submit(len(ids), engine))
                yield self._read(await self.mailbox.take(), engine, ids)
        finally:
            for id in ids:
                engine.cancel(id)

    def _submit(self, index: int, engine: EngineClient) -> int:
        question = self.choices[index].question
        params = question.params.of_choice(index % question.params.n)
        how = question.salt, question.grammar, question.owner, question.adapter
        return engine.submit(question.prompt, params, self.mailbox, index, *how)

    def _read(self, tokens: list[tuple[int, NewToken]], engine: EngineClient, ids: list[int]) -> list[AnswerPiece]:
        pieces: dict[int, AnswerPiece] = {}
        now = time.perf_counter()
        for index, token in tokens:
            choice = self.choices[index]
            if choice.finish_reason is not None:
                continue
            if index not in pieces:
                pieces[index] = AnswerPiece(index)
            choice.add(token, pieces[index])
            self._time(choice, now)
            if choice.finish_reason is not None:
                self._ended += 1
                engine.cancel(ids[index])
        return [piece for piece in pieces.values() if piece]

    def _time(self, choice: GrowingChoice, now: float) -> None:
        """Tokens that arrive together have no time between them."""
        if choice.first_at is None:
            choice.first_at = now
            self._listener.first_token(now - self.arrived)
        else:
            self._listener.next_token(now - (choice.last_at or now))
        choice.last_at = now

    @property
    def prompt_tokens(self) -> int:
        return sum(len(question.prompt) for question in self.questions)

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Counted once a question, as its prompt is: its first choice found what others had left in the cache."""
        firsts = range(0, len(self.choices), self.questions[0].params.n)
        return sum(self.choices[index].cached_tokens for index in firsts)

    def usage(self) -> dict[str, object]:
        prompt, output = self.prompt_tokens, self.output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
                "accepted_prediction_tokens": sum(choice.drafted[0] for choice in self.choices),
                "rejected_prediction_tokens": sum(choice.drafted[1] for choice in self.choices),
            },
        }
