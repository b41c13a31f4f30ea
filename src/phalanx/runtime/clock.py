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
    """Marks three moments of a step: inputs prepared, layers computed, tokens chosen; and a fourth: drafts made.

    A CPU works while it is asked to, so its clock tells. A GPU works later: there the marks are events in its queue.
    """

    def __init__(self, device: torch.device, group: Group) -> None:
        self._on_gpu = device.type == "cuda"
        self._group = group
        self._waited_before = group.seconds
        self._began = time.perf_counter()
        self._moments: list[float] = []
        self._waited: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        self._moments.append(time.perf_counter())
        self._waited.append(self._group.seconds - self._waited_before)
        if self._on_gpu:
            event = _spare_events.pop() if _spare_events else torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def times(self, read_before: float) -> StepTimes:
        """Waits for the step to end. The one before was read at `read_before`, by `time.perf_counter`."""
        times, now = self._parts(), time.perf_counter()
        since = read_before if self._began - read_before < _PAUSE_S else self._began
        return msgspec.structs.replace(times, wall=now - since)

    def _parts(self) -> StepTimes:
        prepared, computed, sampled, drafted = (*self._moments, self._moments[-1])[:4]
        if self._on_gpu:
            first, second, third, last = (*self._events, self._events[-1])[:4]
            last.synchronize()
            parts = [before.elapsed_time(after) / 1e3 for before, after in ((first, second), (second, third))]
            drafting = third.elapsed_time(last) / 1e3
            _spare_events.extend(self._events)
            return StepTimes(drafted - self._began, parts[0], 0.0, parts[1], drafting)
        waited = self._waited[2]
        return StepTimes(
            prepared - self._began, computed - prepared - waited, waited, sampled - computed, drafted - sampled
        )
