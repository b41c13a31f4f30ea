"""TracedGraphs: decode graphs whose parts leave the time at which they began."""

from __future__ import annotations

import torch

from phalanx.engine.step_plan import StepPlan
from phalanx.runtime.batch import News
from phalanx.runtime.graphs import DecodeGraphs, GraphKind, Replayed
from phalanx.runtime.moments import GpuMoments
from phalanx.runtime.sampler import SamplingRows
from phalanx.runtime.tracer import Stamped, Tracer


class TracedGraphs(DecodeGraphs):
    """Captured anew for a trace, with kernels that stamp, in the memory of the usual ones, which stay as they are. A
    step that had to wait for a capture is left out of the trace.
    """

    def __init__(self, usual: DecodeGraphs, tracer: Tracer, gpu: GpuMoments) -> None:
        super().__init__(usual._model, usual._batch, usual._hasty)
        self.recorder = usual.recorder
        self.replayed = 0
        self._tracer, self._gpu = tracer, gpu
        self._marks: dict[GraphKind, tuple[list[Stamped], int]] = {}
        self._build()

    def _build(self) -> None:
        """A step with prompts would have to wait for kernels that stamp: those that graphs have too are built now."""
        for kind in (self.kinds[0], self.kinds[-1]):
            self.rehearse(kind)
        self._gpu.stop()

    def run(self, plan: StepPlan, rows: SamplingRows, news: News) -> Replayed:
        kind = self._kind_for(plan, rows)
        if kind not in self._graphs:
            self.capture(kind)
            self._tracer.leave_out(plan.step)
        results = super().run(plan, rows, news)
        self._tracer.replayed(*self._marks[kind])
        self.replayed += 1
        return results

    @torch.inference_mode()
    def capture(self, kind: GraphKind) -> None:
        step_marks, self._tracer.marks = self._tracer.marks, []
        super().capture(kind)
        self._marks[kind] = self._tracer.marks, self._gpu.used
        self._tracer.marks = step_marks
        self._gpu.begin()

    def rehearse(self, kind: GraphKind) -> Replayed:
        """What it marks is of no use, but that the kernels are there."""
        self._gpu.begin()
        results = super().rehearse(kind)
        self._tracer.marks.clear()
        self._gpu.begin()
        return results
