"""StepClock: where a step's time goes on this rank."""

from __future__ import annotations

import time

import torch

from phalanx.engine.step_plan import StepTimes
from phalanx.fabric.group import Group


class StepClock:
    """Marks three moments of a step: inputs prepared, layers computed, tokens chosen.

    A CPU works while it is asked to, so its clock tells. A GPU works later: there the marks are events in its queue.
    """

    def __init__(self, device: torch.device, group: Group) -> None:
        self._on_gpu = device.type == "cuda"
        self._group = group
        self._waited_before = group.seconds
        self._began = time.perf_counter()
        self._moments: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        self._moments.append(time.perf_counter())
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def stop(self) -> None:
        """The step is launched; what other ranks do from here on is not its time."""
        self._waited = self._group.seconds - self._waited_before

    def times(self) -> StepTimes:
        """Waits for the step to end."""
        prepared, computed, sampled = self._moments
        if self._on_gpu:
            first, second, third = self._events
            third.synchronize()
            return StepTimes(
                sampled - self._began, first.elapsed_time(second) / 1e3, 0.0, second.elapsed_time(third) / 1e3
            )
        return StepTimes(prepared - self._began, computed - prepared - self._waited, self._waited, sampled - computed)
