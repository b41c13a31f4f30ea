"""/v1/chat/completions: from pieces to OpenAI's chat objects."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from phalanx.server import logprobs
from phalanx.server.answer import Answer, AnswerPiece
from phalanx.server.chunks import Chunks, Told
from phalanx.server.parsers import ToolCallDelta
from phalanx.text.tokenizer import Tokenizer


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolDelta(msgspec.Struct, omit_defaults=True):
    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolDelta] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatFormat(Chunks):
    """Writes chat completions. The role comes with the first token of a choice, not before."""

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        prompt_logprobs: int | None = None,
        **usage: bool,
    ) -> None:
        super().__init__({"id": id, "created": created, "model": model}, "chat.completion.chunk", **usage)
        self._prompt_logprobs = prompt_logprobs
        self._tokenizer = tokenizer
        self._greeted: set[int] = set()

    def told_beside(self, piece: AnswerPiece, answer: Answer) -> Told:
        """With the very first piece also the prompt, where tokens are asked for."""
        told, question = super().told_beside(piece, answer), answer.choices[piece.choice].question
        return told | {"prompt_token_ids": question.prompt} if question.tell_tokens and not self._greeted else told

    def choice(self, piece: AnswerPiece, answer: Answer) -> ChunkChoice:
        role = None if piece.choice in self._greeted else "assistant"
        self._greeted.add(piece.choice)
        delta = ChatDelta(
            role,
            piece.content or ("" if role and not piece.reasoning and not piece.tool_calls else None),
            piece.reasoning or None,
            piece.reasoning or None,
            [_tool_delta(call) for call in piece.tool_calls] or None,
        )
        return ChunkChoice(
            piece.choice,
            delta,
            self._logprobs([piece]) if piece.logprobs else None,
            piece.finish_reason,
            answer.choices[piece.choice].stop_reason if piece.finish_reason else None,
            piece.tokens or msgspec.UNSET,
        )

    def body(self, pieces: list[AnswerPiece], answer: Answer) -> dict[str, object]:
        by_choice: defaultdict[int, list[AnswerPiece]] = defaultdict(list)
        for piece in pieces:
            by_choice[piece.choice].append(piece)
        (question,) = answer.questions
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(by_choice[choice.index]),
                    "logprobs": self._logprobs(by_choice[choice.index]),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                | told_tokens(by_choice[choice.index])
                for choice in answer.choices
            ],
            "usage": answer.usage(),
            **({"prompt_token_ids": question.prompt} if question.tell_tokens else {}),
            **self._told_of_prompt(question.prompt, pieces),
        }

    def _logprobs(self, pieces: list[AnswerPiece]) -> dict[str, Any] | None:
        tokens = [token for piece in pieces for token in piece.logprobs]
        return logprobs.for_chat(tokens, self._tokenizer) if tokens else None

    def _told_of_prompt(self, prompt: list[int], pieces: list[AnswerPiece]) -> dict[str, Any]:
        found = next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None)
        told = logprobs.of_prompt(prompt, found, self._prompt_logprobs, self._tokenizer)
        return {} if told is None else {"prompt_logprobs": told}


def told_tokens(pieces: list[AnswerPiece]) -> dict[str, Any]:
    """A choice's tokens, where it was asked for them."""
    tokens = [token for piece in pieces for token in piece.tokens]
    return {"token_ids": tokens} if tokens else {}


def _tool_delta(call: ToolCallDelta) -> ToolDelta:
    kind = None if call.id is None else "function"
    return ToolDelta(call.index, FunctionDelta(call.name, call.arguments), call.id, kind)


def _message(pieces: list[AnswerPiece]) -> dict[str, Any]:
    content = "".join(piece.content for piece in pieces)
    reasoning = "".join(piece.reasoning for piece in pieces)
    calls: dict[int, dict[str, Any]] = {}
    for delta in (delta for piece in pieces for delta in piece.tool_calls):
        if delta.index not in calls:
            function = {"name": delta.name, "arguments": ""}
            calls[delta.index] = {"id": delta.id, "type": "function", "function": function}
        calls[delta.index]["function"]["arguments"] += delta.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message["tool_calls"] = list(calls.values())
    return message
