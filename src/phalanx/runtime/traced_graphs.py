"""TracedGraphs: decode graphs whose parts leave the time at which they began."""

from __future__ import annotations

import torch

from phalanx.engine.step_plan import StepPlan
from phalanx.runtime.graphs import DecodeGraphs, GraphKind, Recorded, Replayed
from phalanx.runtime.tracer import Stamped, Tracer


class TracedGraphs(DecodeGraphs):
    """Captured anew for a trace, with events between the parts, in the memory of the usual ones, which stay as they
    are. Every replay writes over a graph's events, and two steps may be on their way: there are two of each graph, used
    in turn. A step that had to wait for a capture is left out of the trace.
    """

    def __init__(self, usual: DecodeGraphs, tracer: Tracer) -> None:
        super().__init__(usual._model, usual._batch)
        self.recorder = usual.recorder
        self.replayed = 0
        self._tracer = tracer
        self._turns: list[dict[GraphKind, Recorded]] = [{}, {}]
        self._events: dict[torch.cuda.CUDAGraph, list[Stamped]] = {}

    def run(self, plan: StepPlan, drawn: bool) -> Replayed:
        self._turns.reverse()
        self._graphs = self._turns[0]
        kind = self._kind_for([position - 1 for position in plan.yielded()[1]], drawn)
        if kind not in self._graphs:
            self.capture(kind)
            self._tracer.leave_out(plan.step)
        results = super().run(plan, drawn)
        self._tracer.marks += self._events[self._graphs[kind].graph]
        self.replayed += 1
        return results

    @torch.inference_mode()
    def capture(self, kind: GraphKind) -> None:
        step_marks, self._tracer.marks = self._tracer.marks, []
        super().capture(kind)
        marks, self._tracer.marks = self._tracer.marks, step_marks
        self._events[self._graphs[kind].graph] = marks

    def rehearse(self, kind: GraphKind) -> Replayed:
        """What it marks is of no use."""
        results = super().rehearse(kind)
        self._tracer.marks.clear()
        return results
