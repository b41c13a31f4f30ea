"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from phalanx.engine.plan import Runner
from phalanx.engine.request import Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Output, Scheduler
from phalanx.errors import RequestError


class Engine:
    """Ties a scheduler to a runner. With a runner of depth 2, step N+1 is launched before step N is read."""

    def __init__(self, scheduler: Scheduler, runner: Runner, vocab: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.vocab = vocab
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests) or self.scheduler.in_flight > 0

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuse what cannot be served, before it is in the books."""
        limit = self.scheduler.limits.max_model_len
        if not prompt:
            raise RequestError("empty_prompt", "The prompt has no tokens.", "Give at least one token.")
        if len(prompt) >= limit:
            raise RequestError(
                "prompt_too_long",
                f"The prompt has {len(prompt)} tokens, the context is {limit} and the answer needs at least one.",
                f"Shorten the prompt to {limit - 1} tokens or raise max_model_len.",
            )
        self._check_ids("The prompt", prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", list(params.logit_bias))

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab:
            return
        for index, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab:
                raise RequestError(
                    "token_out_of_range",
                    f"{what} holds {token!r} at index {index}; the vocabulary has {self.vocab} tokens.",
                    f"Token ids are whole numbers from 0 to {self.vocab - 1}.",
                )

    def add(self, prompt: Sequence[int], params: SamplingParams, salt: str | None = None) -> Request:
        """Queue a request. `salt` keeps its cached prefixes apart from those of other salts."""
        self.check(prompt, params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._next_id += 1
        request = Request(self._next_id, list(prompt), params, seed, salt)
        self.scheduler.add(request)
        return request

    def cancel(self, request_id: int) -> bool:
        return self.scheduler.cancel(request_id)

    def step(self) -> list[Output]:
        """Launch the next step; read the oldest one when the runner is full or nothing could be launched."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.runner.launch(plan)
        due = self.scheduler.in_flight
        if due and (plan is None or due >= self.runner.depth):
            return self.scheduler.apply(self.runner.collect())
        return []

    def close(self) -> None:
        self.runner.close()
