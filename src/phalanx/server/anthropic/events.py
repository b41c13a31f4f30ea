"""/v1/messages: from pieces to Anthropic's messages and events."""

from __future__ import annotations

import json
from typing import Any

from phalanx.server.answer import Answer, AnswerPiece
from phalanx.server.blocks import Block, Blocks, Change, blocks_of
from phalanx.server.errors import ApiError, anthropic_error
from phalanx.server.sse import named_event

SIGNATURE = "unsigned"
"""Of a thought. Clients send it back with the thought, and some take none for a thought that is incomplete."""


class MessageFormat:
    """Writes a message, whole or as events. It begins with the first token, not before."""

    def __init__(self, id: str, model: str) -> None:
        self._id = id
        self._model = model
        self._blocks = Blocks()
        self._begun = False

    def events(self, piece: AnswerPiece, answer: Answer) -> bytes:
        changes = b"".join(map(_event, self._blocks.add(piece)))
        return self._start(answer) + changes

    def last_events(self, answer: Answer) -> bytes:
        changes = b"".join(map(_event, self._blocks.finish()))
        delta = {"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)}
        return self._start(answer) + changes + named_event(delta) + named_event({"type": "message_stop"})

    def last_error(self, error: ApiError, answer: Answer) -> bytes:
        return named_event(self.error(error))

    def error(self, error: ApiError) -> dict[str, Any]:
        return anthropic_error(error)

    def body(self, pieces: list[AnswerPiece], answer: Answer) -> dict[str, Any]:
        content = [_whole(block) for block in blocks_of(pieces)]
        return self._message(content, _usage(answer)) | _end(answer)

    def _start(self, answer: Answer) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message = self._message([], _usage(answer) | {"output_tokens": 0})
        return named_event({"type": "message_start", "message": message}) + named_event({"type": "ping"})

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _event(change: Change) -> bytes:
    what, block, more, _ = change
    if what == "begins":
        return named_event({"type": "content_block_start", "index": block.index, "content_block": _empty(block)})
    if what == "grows":
        return named_event({"type": "content_block_delta", "index": block.index, "delta": _delta(block, more)})
    sealed = b""
    if block.kind == "reasoning":
        delta = {"type": "signature_delta", "signature": SIGNATURE}
        sealed = named_event({"type": "content_block_delta", "index": block.index, "delta": delta})
    return sealed + named_event({"type": "content_block_stop", "index": block.index})


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _delta(block: Block, more: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": more}
    if block.kind == "text":
        return {"type": "text_delta", "text": more}
    return {"type": "input_json_delta", "partial_json": more}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return _empty(block) | {"input": _arguments(block.text)}


def _arguments(text: str) -> dict[str, Any]:
    """Of a call that was cut off there are none: what there is cannot be read."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _end(answer: Answer) -> dict[str, Any]:
    """Why the message ends. One that fills the context has not come to the number of tokens that was asked for."""
    (choice,) = answer.choices
    asked = choice.question.params.max_tokens
    reason, sequence = "end_turn", None
    if choice.finish_reason == "length":
        reason = "max_tokens" if choice.output_tokens == asked else "model_context_window_exceeded"
    elif choice.finish_reason == "tool_calls":
        reason = "tool_use"
    elif isinstance(choice.stop_reason, str):
        reason, sequence = "stop_sequence", choice.stop_reason
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(answer: Answer) -> dict[str, Any]:
    cached = answer.cached_tokens
    return {
        "input_tokens": answer.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer.output_tokens,
    }
