"""The scheduling rules of other engines, as small changes to the one scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from phalanx.cost.rules import AdmissionRule
from phalanx.engine.agenda import Agenda
from phalanx.engine.request import Request
from phalanx.engine.scheduler import Scheduler


class FirstCome(Scheduler):
    """Prompts in order: none of them passes a long one."""

    def _is_long(self, request: Request) -> bool:
        return False


class PrefillFirst(FirstCome):
    """A step holds prompts or decodes, never both; prompts go first and decodes wait."""

    def _fill(self, agenda: Agenda) -> None:
        left = self._sharing.parts()
        for owner in left:
            self._continue_prompts(agenda, left, owner, may_admit=True)
        self._admit(agenda, left, self._sharing.next_ones(left))
        if not agenda.prompts:
            super()._fill(agenda)


class WholePrompts(FirstCome):
    """A prompt is not cut: it waits for a step with room for all of it. One too long to fit beside the decodes alone
    runs in pieces.
    """

    def _admit(self, agenda: Agenda, left: dict[str, int], candidates: Iterable[Request]) -> None:
        super()._admit(agenda, left, islice(candidates, self._fitting(sum(left.values()))))

    def _fitting(self, budget: int) -> int:
        """How many of the waiting requests fit whole, or one that would never."""
        count = 0
        for request in self.waiting:
            budget -= request.length
            if budget < 0:
                return count or int(not self.prompts)
            count += 1
        return count


class StaticBatches(FirstCome):
    """Nobody enters a batch that runs: the next one begins when all of the last have left."""

    _to_come = 0

    def _admit(self, agenda: Agenda, left: dict[str, int], candidates: Iterable[Request]) -> None:
        before = len(self.waiting)
        if before == len(self.requests):
            self._to_come = min(before, self.limits.max_num_seqs)
        super()._admit(agenda, left, islice(candidates, self._to_come))
        self._to_come -= before - len(self.waiting)


POLICIES: dict[AdmissionRule, type[Scheduler]] = {
    "fair": Scheduler,
    "mixed": FirstCome,
    "whole": WholePrompts,
    "first": PrefillFirst,
    "static": StaticBatches,
}
