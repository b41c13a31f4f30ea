"""StepClock: where a step's time goes on this rank."""

from __future__ import annotations

import time

import msgspec
import torch

from phalanx.engine.step_plan import StepTimes
from phalanx.fabric.group import Group

_PAUSE_S = 0.02
"""A host that launches nothing for longer had nothing to do."""

_spare_events: list[torch.cuda.Event] = []
"""Those of steps that were read: to make one takes longer than to record it."""


class StepClock:
    """Marks three moments of a step: inputs prepared, layers computed, tokens chosen; and a fourth: drafts made. Who
    makes it says whether what it tells is `steady`.

    A CPU works while it is asked to, so its clock tells. A GPU works later: there the marks are events in its queue.
    """

    def __init__(self, device: torch.device, group: Group) -> None:
        self._on_gpu = device.type == "cuda"
        self._group = group
        self.steady = True
        self._waited_before = group.seconds
        self._began = time.perf_counter()
        self._moments: list[float] = []
        self._waited: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._draft_s: float | None = None

    def mark(self) -> None:
        self._moments.append(time.perf_counter())
        self._waited.append(self._group.seconds - self._waited_before)
        if self._on_gpu:
            event = _spare_events.pop() if _spare_events else torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def times(self, read_before: float, drafted: StepClock | None) -> StepTimes:
        """Waits for the tokens of the step, and for the drafts of the one with the clock `drafted`: this step, or the
        one before where they stay. The step before was read at `read_before`, by `time.perf_counter`.
        """
        times = self._parts()
        draft, now = drafted.drafting() if drafted is not None else 0.0, time.perf_counter()
        since = read_before if self._began - read_before < _PAUSE_S else self._began
        steady = self.steady and (drafted is None or drafted.steady)
        return msgspec.structs.replace(times, draft=draft, wall=now - since, steady=steady)

    def _parts(self) -> StepTimes:
        prepared, computed, sampled = self._moments[:3]
        if self._on_gpu:
            first, second, third = self._events[:3]
            third.synchronize()
            parts = [before.elapsed_time(after) / 1e3 for before, after in ((first, second), (second, third))]
            _spare_events.extend((first, second))
            return StepTimes(self._moments[-1] - self._began, parts[0], 0.0, parts[1])
        waited = self._waited[2]
        return StepTimes(prepared - self._began, computed - prepared - waited, waited, sampled - computed)

    def drafting(self) -> float:
        """What drafts took. Waits for them."""
        if not self._on_gpu:
            return self._moments[-1] - self._moments[2]
        if self._draft_s is None:
            third, last = self._events[2], self._events[-1]
            self._group.wait_for(last)
            self._draft_s = third.elapsed_time(last) / 1e3
            _spare_events.extend(self._events[2:])
        return self._draft_s
