"""The scheduling rules of other engines, as small changes to the one scheduler."""

from __future__ import annotations

from collections import deque
from itertools import islice

from phalanx.cost.rules import Admission
from phalanx.engine.plan import StepPlan
from phalanx.engine.request import Request
from phalanx.engine.scheduler import Scheduler, _Rows


def _is_prompt(request: Request) -> bool:
    return request.length - request.computed > 1


class PrefillFirst(Scheduler):
    """A step holds prompts or decodes, never both; prompts go first and decodes wait."""

    def schedule(self) -> StepPlan | None:
        decoding = [request for request in self.running if not _is_prompt(request)]
        self.running = [request for request in self.running if _is_prompt(request)]
        plan = super().schedule()
        self.running = decoding + self.running
        return plan if plan is not None else super().schedule()


class WholePrompts(Scheduler):
    """A prompt is not cut: it waits for a step with room for all of it. One too long to fit beside the decodes alone
    runs in pieces.
    """

    def _admit_waiting(self, rows: _Rows, budget: int) -> None:
        fitting = self._fitting(budget)
        behind = list(islice(self.waiting, fitting, None))
        self.waiting = deque(islice(self.waiting, fitting))
        super()._admit_waiting(rows, budget)
        self.waiting.extend(behind)

    def _fitting(self, budget: int) -> int:
        """How many of the waiting requests fit whole, or one that would never."""
        count = 0
        for request in self.waiting:
            budget -= request.length
            if budget < 0:
                return count or int(not any(map(_is_prompt, self.running)))
            count += 1
        return count


POLICIES: dict[Admission, type[Scheduler]] = {"mixed": Scheduler, "whole": WholePrompts, "first": PrefillFirst}
