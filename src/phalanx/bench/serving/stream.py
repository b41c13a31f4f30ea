"""A streamed answer, from bytes as they come to the trace of a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from phalanx.bench.serving.measure import RequestTrace

_LONGEST_MESSAGE = 300


class _Function(msgspec.Struct):
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def carries_text(self) -> bool:
        """A role alone, or nothing at all, is no text."""
        if self.text:
            return True
        delta = self.delta
        if delta is None:
            return False
        if delta.content or delta.reasoning_content or delta.reasoning:
            return True
        return any(call.function and call.function.arguments for call in delta.tool_calls or ())


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Frames:
    """Server-sent events from pieces cut anywhere, each byte looked at a constant number of times.

    Lines end in LF or CRLF. Comments and fields other than `data` are skipped.
    """

    def __init__(self) -> None:
        self._unfinished: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that this piece completes."""
        if b"\n" not in piece:
            self._unfinished.append(piece)
            return
        lines = b"".join((*self._unfinished, piece)).split(b"\n")
        self._unfinished = [lines.pop()]
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event = b"\n".join(self._data)
                self._data.clear()
                yield event


class TraceWriter:
    """Fills a request's trace from the pieces of its answer."""

    def __init__(self, trace: RequestTrace) -> None:
        self._trace = trace
        self._frames = Frames()
        self._complete = False

    def feed(self, piece: bytes, now: float) -> None:
        """Pieces after an error are of no interest: the caller may stop reading."""
        for event in self._frames.feed(piece):
            if event == b"[DONE]":
                self._complete = True
                continue
            try:
                self._add(_decode(event), now)
            except msgspec.DecodeError as error:
                self._trace.error = f"a chunk that is none: {error}"

    def close(self, now: float) -> None:
        """At the end of the stream. The last event may lack its empty line; the answer may lack its end."""
        self.feed(b"\n\n", now)
        trace = self._trace
        if trace.error is not None:
            return
        if not self._complete:
            trace.error = "the stream broke off before the answer was complete"
        elif not trace.tokens:
            trace.error = "the answer is empty"
        elif not trace.ended:
            trace.ended = now

    def _add(self, chunk: _Chunk, now: float) -> None:
        trace = self._trace
        if chunk.error is not None or chunk.object == "error":
            trace.error = error_message(chunk.error if chunk.error is not None else chunk.message)
            return
        for choice in chunk.choices:
            if choice.carries_text():
                trace.text_at.append(now)
                trace.ended = now
            if choice.finish_reason is not None:
                self._complete = True
                trace.ended = now
        if chunk.usage is not None:
            self._count(chunk.usage)

    def _count(self, usage: _Usage) -> None:
        trace = self._trace
        if usage.prompt_tokens is not None:
            trace.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            trace.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            trace.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens_details is not None:
            details = usage.completion_tokens_details
            trace.drafted = (details.accepted_prediction_tokens or 0, details.rejected_prediction_tokens or 0)


def error_message(error: Any) -> str:
    """The one line that says what a server's error object, or plain text, is about."""
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or error.get("detail") or msgspec.json.encode(error).decode()
    line = " ".join(str(error).split())
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}..."
