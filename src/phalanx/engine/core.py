"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.engine.adapters import AdapterBook
from phalanx.engine.output import Output
from phalanx.engine.request import Matcher, Request
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.scheduler import Scheduler
from phalanx.engine.step_plan import Runner, StepPlan, Totals
from phalanx.errors import EngineDeadError, RequestError, StepLostError, StepMemoryError

SHORT_AGAIN_S = 60.0
"""A second step without memory within this time ends the engine: what is short will stay so."""

log = logging.getLogger("phalanx.engine")


def check_request(prompt: Sequence[int], params: SamplingParams, vocab: int, max_model_len: int) -> None:
    """Refuse what cannot be served, before it is in the books."""
    check_length(prompt, params, max_model_len)
    for what, ids in (
        ("The prompt", prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", list(params.logit_bias)),
    ):
        _check_ids(what, ids, vocab)


def check_length(prompt: Sequence[int], params: SamplingParams, max_model_len: int) -> None:
    if not prompt:
        raise RequestError("empty_prompt", "The prompt has no tokens.", "Give at least one token.")
    most, needs = (max_model_len, "") if params.max_tokens == 0 else (max_model_len - 1, " and the answer needs one")
    if len(prompt) > most:
        raise RequestError(
            "prompt_too_long",
            f"The prompt has {len(prompt)} tokens, the context is {max_model_len}{needs}.",
            f"Shorten the prompt to {most} tokens or raise max_model_len.",
        )


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

    def __init__(self, scheduler: Scheduler, runner: Runner, vocab: int, adapters: AdapterBook | None = None) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.vocab = vocab
        self.adapters = adapters or AdapterBook()
        self.totals = Totals()
        self._next_id = 0
        self._short_at: float | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests) or self.scheduler.in_flight > 0

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        check_request(prompt, params, self.vocab, self.scheduler.limits.max_model_len)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        salt: str | None = None,
        matcher: Matcher | None = None,
        owner: str = "",
        adapter: str | None = None,
    ) -> Request:
        """Queue a request. `salt` keeps its cached prefixes apart from others', `matcher` its answer to a grammar.

        Requests of different owners share the engine in equal parts. With an `adapter`, it is answered by the model as
        that changes it.
        """
        self.check(prompt, params)
        number = 0 if adapter is None else self.adapters.number(adapter)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._next_id += 1
        request = Request(self._next_id, list(prompt), params, seed, salt, matcher, owner, number)
        self.scheduler.add(request)
        return request

    def cancel(self, request_id: int) -> bool:
        return self.scheduler.cancel(request_id)

    def load_adapter(self, name: str, folder: Path) -> None:
        """From the next request on it can be asked for by this name. AdapterError if it cannot be had."""
        self.runner.adapt(self.adapters.load(name, folder))

    def unload_adapter(self, name: str) -> None:
        """No more requests can ask for it; those that do already are answered by it."""
        self.adapters.unload(name)
        self._let_adapters_go()

    def _let_adapters_go(self) -> None:
        for order in self.adapters.left(self.scheduler.requests.values()):
            self.runner.adapt(order)

    def step(self) -> list[Output]:
        """Launch the next step; read the oldest one when the runner is full or nothing could be launched."""
        if self.adapters.any_leaving:
            self._let_adapters_go()
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        self.totals.schedule_s += time.perf_counter() - began
        if plan is not None:
            self.totals.launched(plan)
            try:
                self.runner.launch(plan)
            except StepMemoryError as error:
                return [self._give_up(plan, error)]
        due = self.scheduler.in_flight
        if due and (plan is None or due >= self.runner.depth):
            try:
                result = self.runner.collect()
            except StepLostError as error:
                self._compute_again(error)
                return []
            self.totals.collected(result)
            return self.scheduler.apply(result, self.runner.find_break)
        return []

    def _compute_again(self, error: StepLostError) -> None:
        """The ranks do not agree on a step: what it gave is not told, nor what was launched behind it."""
        log.warning("%s It is computed again. %s", error.found, error.fix)
        for _ in range(self.scheduler.in_flight - 1):
            with suppress(StepLostError):
                self.runner.collect()
        self.scheduler.discard()

    def _give_up(self, plan: StepPlan, error: StepMemoryError) -> Output:
        """End the youngest request of a step that had no memory, so that the others may find some."""
        before, self._short_at = self._short_at, time.monotonic()
        if before is not None and self._short_at - before < SHORT_AGAIN_S:
            self.runner.close()
            found = f"Two steps ran out of memory within {SHORT_AGAIN_S:.0f} s. {error.found}"
            raise EngineDeadError(error.code, found, error.fix) from error
        ended = self.scheduler.abandon(
            plan,
            RequestError(
                error.code,
                f"A step of {plan.num_tokens} tokens ran out of memory; of its {len(plan.slots)} requests this one, "
                "the youngest, was ended.",
                "Send it again, and if that fails, with fewer tokens.",
            ),
        )
        log.warning("%s %s Request %d was ended.", error.found, error.fix, ended.request_id)
        return ended

    def close(self) -> None:
        self.runner.close()
