"""Blocks: an answer as a row of thoughts, texts and calls, one after the other, for APIs that tell it so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phalanx.engine.logprobs import TokenLogprobs
from phalanx.server.answer import AnswerPiece
from phalanx.server.logprobs import SampledTokens

BlockKind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """`id` and `name` are a call's; its `text` is the JSON of its arguments."""

    index: int
    kind: BlockKind
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Change(NamedTuple):
    """A block begins, grows by `more`, or ends."""

    what: Literal["begins", "grows", "ends"]
    block: Block
    more: str = ""
    logprobs: SampledTokens = ()


class Blocks:
    """Cuts pieces into blocks. Only the last one is open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._call = -1

    def add(self, piece: AnswerPiece) -> Iterator[Change]:
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning)
        if piece.content or (piece.logprobs and self._open is not None and self._open.kind == "text"):
            yield from self._grow("text", piece.content, piece.logprobs)
        for call in piece.tool_calls:
            if call.index != self._call:
                self._call = call.index
                yield from self._begin("call", call.id or "", call.name or "")
            if call.arguments:
                yield from self._grow("call", call.arguments)

    def finish(self) -> Iterator[Change]:
        if self._open is not None:
            yield Change("ends", self._open)
            self._open = None

    def _grow(self, kind: BlockKind, more: str, logprobs: SampledTokens | None = None) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(more)
        self._open.logprobs += logprobs or []
        yield Change("grows", self._open, more, logprobs or [])

    def _begin(self, kind: BlockKind, id: str = "", name: str = "") -> Iterator[Change]:
        yield from self.finish()
        self._open = Block(len(self.all), kind, id, name)
        self.all.append(self._open)
        yield Change("begins", self._open)


def blocks_of(pieces: list[AnswerPiece]) -> list[Block]:
    """Those of a whole answer."""
    blocks = Blocks()
    for piece in pieces:
        for _ in blocks.add(piece):
            pass
    return blocks.all
