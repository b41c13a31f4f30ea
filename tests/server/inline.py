"""Requests read in this process, for tests of what comes after."""

from __future__ import annotations

from functools import cache

from phalanx.server.errors import ApiError
from phalanx.server.prepare import RequestReader
from phalanx.server.prepared import (
    Asked,
    Assignment,
    Continues,
    DetokenizedText,
    Prepared,
    Problem,
    RequestKind,
    TokenizedText,
    decode_asked,
    decode_assignment,
    decode_outcome,
    encode,
)
from phalanx.spec import ModelSpec
from phalanx.text.tokenizer import Tokenizer
from phalanx.weights.checkpoint import Checkpoint, locate


@cache
def default_model() -> tuple[ModelSpec, Tokenizer]:
    """Its file names 49,152 tokens: read once."""
    tokenizer = Tokenizer.load(locate(None))
    assert tokenizer is not None
    return Checkpoint(locate(None)).spec, tokenizer


@cache
def _reader(assignment: bytes) -> RequestReader:
    return RequestReader(decode_assignment(assignment))


class InlinePreparer:
    """Does what a `Preparer` has done elsewhere."""

    adapters: list[str] = []  # noqa: RUF012

    async def start(self, assignment: Assignment) -> None:
        self.reader = _reader(encode(assignment))

    async def prepare(
        self, kind: RequestKind, body: bytes, client: str, earlier: bytes | None = None
    ) -> Prepared | TokenizedText | DetokenizedText | Continues:
        asked = decode_asked(encode(Asked(kind, body, earlier, self.adapters)))
        outcome = decode_outcome(encode(self.reader.outcome(asked)))
        if isinstance(outcome, Problem):
            assert not outcome.trace, outcome.trace
            raise ApiError(outcome.status, outcome.message, outcome.code, param=outcome.param)
        return outcome
