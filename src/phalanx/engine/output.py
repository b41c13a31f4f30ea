"""Output: what a step brings a request."""

from __future__ import annotations

import msgspec

from phalanx.engine.logprobs import PromptLogprobs, TokenLogprobs

NO_TOKEN = -1


class Output(msgspec.Struct, frozen=True, gc=False):
    """One new token of a request, and why it ends if it does. With `NO_TOKEN` it ends without one.

    `cached_tokens` of its prompt came from the cache; it had waited `queued_s` seconds for its first step. The first
    one also has what was asked about the prompt. Of its drafts so far, `drafted` says how many came true and how many
    did not.
    """

    request_id: int
    token: int
    logprobs: TokenLogprobs | None
    finish_reason: str | None
    cached_tokens: int
    queued_s: float
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes | None = None
    drafted: tuple[int, int] = (0, 0)
