"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from phalanx.engine.plan import Runner, Totals
from phalanx.engine.request import Matcher, Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Output, Scheduler
from phalanx.errors import RequestError


def check_request(prompt: Sequence[int], params: SamplingParams, vocab: int, max_model_len: int) -> None:
    """Refuse what cannot be served, before it is in the books."""
    if not prompt:
        raise RequestError("empty_prompt", "The prompt has no tokens.", "Give at least one token.")
    if len(prompt) >= max_model_len:
        raise RequestError(
            "prompt_too_long",
            f"The prompt has {len(prompt)} tokens, the context is {max_model_len} and the answer needs at least one.",
            f"Shorten the prompt to {max_model_len - 1} tokens or raise max_model_len.",
        )
    for what, ids in (
        ("The prompt", prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", list(params.logit_bias)),
    ):
        _check_ids(what, ids, vocab)


def _check_ids(what: str, ids: Sequence[int], vocab: int) -> None:
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab:
        return
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise RequestError(
                "token_out_of_range",
                f"{what} holds {token!r} at index {index}; the vocabulary has {vocab} tokens.",
                f"Token ids are whole numbers from 0 to {vocab - 1}.",
            )


class Engine:
    """Ties a scheduler to a runner. With a runner of depth 2, step N+1 is launched before step N is read."""

    def __init__(self, scheduler: Scheduler, runner: Runner, vocab: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.vocab = vocab
        self.totals = Totals()
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests) or self.scheduler.in_flight > 0

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        check_request(prompt, params, self.vocab, self.scheduler.limits.max_model_len)

    def add(
        self, prompt: Sequence[int], params: SamplingParams, salt: str | None = None, matcher: Matcher | None = None
    ) -> Request:
        """Queue a request. `salt` keeps its cached prefixes apart from others', `matcher` its answer to a grammar."""
        self.check(prompt, params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._next_id += 1
        request = Request(self._next_id, list(prompt), params, seed, salt, matcher)
        self.scheduler.add(request)
        return request

    def cancel(self, request_id: int) -> bool:
        return self.scheduler.cancel(request_id)

    def step(self) -> list[Output]:
        """Launch the next step; read the oldest one when the runner is full or nothing could be launched."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        self.totals.schedule_s += time.perf_counter() - began
        if plan is not None:
            self.totals.launched(plan)
            self.runner.launch(plan)
        due = self.scheduler.in_flight
        if due and (plan is None or due >= self.runner.depth):
            result = self.runner.collect()
            self.totals.collected(result)
            return self.scheduler.apply(result)
        return []

    def close(self) -> None:
        self.runner.close()
