"""Preparer: the server's side of the processes that read its requests."""

from __future__ import annotations

import logging

from phalanx.server.errors import ApiError
from phalanx.server.fairness import Turns
from phalanx.server.forked_client import Forked, Lost
from phalanx.server.prepared import (
    LANES,
    LARGE,
    QUICK,
    Asked,
    Assignment,
    Continues,
    DetokenizedText,
    Prepared,
    Problem,
    RequestKind,
    TokenizedText,
    decode_outcome,
    decode_ready,
    encode,
)

log = logging.getLogger("phalanx.server")

PREPARE_MODULE = "phalanx.server.prepare"
QUICK_BYTES = 16 * 1024


class Preparer:
    """Has requests read outside of this process: small ones and large ones on lanes of their own, keys in turn."""

    def __init__(self) -> None:
        self._processes = Forked(PREPARE_MODULE, LANES)
        self._turns = [Turns() for _ in LANES]
        self.adapters: list[str] = []

    def spawn(self) -> None:
        """Start the processes, which import while the model's tokenizer is read."""
        self._processes.spawn()

    async def start(self, assignment: Assignment) -> None:
        ready = decode_ready(await self._processes.start(encode(assignment)))
        if ready.bad_template is not None:
            log.warning("the model's chat template is not used: %s", ready.bad_template)

    async def prepare(
        self, kind: RequestKind, body: bytes, client: str, earlier: bytes | None = None
    ) -> Prepared | TokenizedText | DetokenizedText | Continues:
        """What a request comes to. ApiError if something is wrong with it."""
        lane = QUICK if len(body) + len(earlier or b"") <= QUICK_BYTES else LARGE
        try:
            async with self._turns[lane].turn(client):
                asked = encode(Asked(kind, body, earlier, self.adapters))
                outcome = decode_outcome(await self._processes.ask(lane, asked))
        except Lost as lost:
            raise ApiError(
                400,
                f"The request could not be read: {lost}. Make it smaller, or simpler.",
                "request_too_complex",
            ) from None
        if isinstance(outcome, Problem):
            if outcome.trace:
                log.error("a request could not be read:\n%s", outcome.trace)
            raise ApiError(outcome.status, outcome.message, outcome.code, param=outcome.param)
        return outcome

    async def close(self) -> None:
        await self._processes.close()
