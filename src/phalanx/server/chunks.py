"""Chunks: how OpenAI's two endpoints for completions stream."""

from __future__ import annotations

from abc import ABC, abstractmethod

from phalanx.server.answer import Answer, AnswerPiece
from phalanx.server.errors import ApiError
from phalanx.server.sse import DONE, event

Usage = dict[str, object]


class Chunks(ABC):
    """An event a piece, then the usage if it is wanted, then `[DONE]`."""

    def __init__(self, include_usage: bool = False, continuous_usage: bool = False) -> None:
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    @abstractmethod
    def chunk(self, piece: AnswerPiece, answer: Answer, usage: Usage | None) -> object:
        """A piece as the object of one event."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> object: ...

    def events(self, piece: AnswerPiece, answer: Answer) -> bytes:
        return event(self.chunk(piece, answer, answer.usage() if self._continuous_usage else None))

    def last_events(self, answer: Answer) -> bytes:
        return (event(self.usage_chunk(answer.usage())) if self._include_usage else b"") + DONE

    def last_error(self, error: ApiError, answer: Answer) -> bytes:
        return event(error.body) + DONE

    def error(self, error: ApiError) -> object:
        return error.body
