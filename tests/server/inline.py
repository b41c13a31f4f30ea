"""Requests read in this process, for tests of what comes after."""

from __future__ import annotations

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
    decode_outcome,
    encode,
)


class InlinePreparer:
    """Does what a `Preparer` has done elsewhere."""

    adapters: list[str] = []  # noqa: RUF012

    async def start(self, assignment: Assignment) -> None:
        self.reader = RequestReader(assignment)

    async def prepare(
        self, kind: RequestKind, body: bytes, client: str, earlier: bytes | None = None
    ) -> Prepared | TokenizedText | DetokenizedText | Continues:
        asked = decode_asked(encode(Asked(kind, body, earlier, self.adapters)))
        outcome = decode_outcome(encode(self.reader.outcome(asked)))
        if isinstance(outcome, Problem):
            assert not outcome.trace, outcome.trace
            raise ApiError(outcome.status, outcome.message, outcome.code, param=outcome.param)
        return outcome
