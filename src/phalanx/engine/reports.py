"""Reports: what requests are told of their prompts besides the token behind it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from phalanx.engine.output import NO_TOKEN, Output
from phalanx.engine.request import Phase, Request
from phalanx.engine.step_plan import StepPlan, StepResult


class Reports:
    """The scheduler's books on requests whose prompt is reported on, or that want nothing but their prompt computed.

    What a step finds out comes with its result. It is kept with the request until the prompt is whole, and goes out
    with the first token.
    """

    def __init__(self) -> None:
        self._untold: dict[int, Request] = {}
        self._in_flight: dict[int, dict[int, Request]] = {}

    def add(self, request: Request) -> None:
        if request.params.reports:
            self._untold[request.id] = request

    @property
    def any_in_flight(self) -> bool:
        return bool(self._in_flight)

    def mark(self, plan: StepPlan) -> StepPlan:
        """The plan, with the rows marked that are reported on."""
        if not self._untold:
            return plan
        self._untold = {id: request for id, request in self._untold.items() if request.phase is not Phase.FINISHED}
        seated = {request.slot: request for request in self._untold.values() if request.phase is Phase.RUNNING}
        rows = {
            row: seated[slot]
            for row, (slot, start) in enumerate(zip(plan.slots, plan.starts, strict=True))
            if slot in seated and start < seated[slot].prompt_length
        }
        if not rows:
            return plan
        self._in_flight[plan.step] = {plan.slots[row]: request for row, request in rows.items()}
        looked_into = [row for row, request in rows.items() if request.params.looks_into_prompt]
        return msgspec.structs.replace(plan, reported=looked_into)

    def forget(self, plan: StepPlan) -> None:
        """The step did not run."""
        self._in_flight.pop(plan.step, None)

    def complete(self, result: StepResult, outputs: Iterable[Output]) -> list[Output]:
        """The outputs of a step, with what there is to tell where a prompt ended in it."""
        of_slot = self._in_flight.pop(result.step, {})
        for slot, part in result.prompt_logprobs:
            request = of_slot[slot]
            assert request.prompt_logprobs is not None
            request.prompt_logprobs = request.prompt_logprobs.extended(part)
        for slot, embedding in result.embeddings:
            of_slot[slot].embedding = embedding
        of_id = {request.id: request for request in of_slot.values()}
        return [self._told(output, of_id.get(output.request_id)) for output in outputs]

    def _told(self, output: Output, request: Request | None) -> Output:
        if request is None:
            return output
        self._untold.pop(request.id, None)
        request.told = True
        return msgspec.structs.replace(
            output,
            token=NO_TOKEN if request.params.max_tokens == 0 else output.token,
            logprobs=None if request.params.max_tokens == 0 else output.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            embedding=request.embedding,
        )
