"""Chunks: how OpenAI's two endpoints for completions stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from phalanx.server.answer import Answer, AnswerPiece
from phalanx.server.errors import ApiError
from phalanx.server.sse import DONE, event

Told = dict[str, Any]


class Chunks(ABC):
    """An event a piece, then the usage if it is wanted, then `[DONE]`. `head` is told in each: it is written once."""

    def __init__(self, head: Told, object: str, include_usage: bool = False, continuous_usage: bool = False) -> None:
        self._head = head
        self._before = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._after = b'"object":' + msgspec.json.encode(object) + b"}\n\n"
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    @abstractmethod
    def choice(self, piece: AnswerPiece, answer: Answer) -> object:
        """What a chunk says of the one choice it is about."""

    def told_beside(self, piece: AnswerPiece, answer: Answer) -> Told:
        return {"usage": answer.usage()} if self._continuous_usage else {}

    def events(self, piece: AnswerPiece, answer: Answer) -> bytes:
        beside = self.told_beside(piece, answer)
        return self._chunk(msgspec.json.encode(self.choice(piece, answer)), beside)

    def _chunk(self, choice: bytes, beside: Told) -> bytes:
        told = msgspec.json.encode(beside)[1:-1] + b"," if beside else b""
        return b"".join((self._before, choice, b"],", told, self._after))

    def last_events(self, answer: Answer) -> bytes:
        return (self._chunk(b"", {"usage": answer.usage()}) if self._include_usage else b"") + DONE

    def last_error(self, error: ApiError, answer: Answer) -> bytes:
        return event(error.body) + DONE

    def error(self, error: ApiError) -> object:
        return error.body
