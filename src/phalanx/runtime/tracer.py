"""Tracer: a rank's page that also writes down when each part of a step began."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.engine.marks import CALL_ENDS, PLACE, SAMPLED, SAMPLING, Hooks, Mark, RankTrace, StepMarks
from phalanx.engine.step_plan import StepPlan
from phalanx.engine.whereabouts import ALL_REDUCE, GATHER, Whereabouts
from phalanx.fabric.group import Group
from phalanx.fabric.nccl import NcclGroup
from phalanx.fabric.peer import PeerGroup
from phalanx.fabric.tree import TreeGroup
from phalanx.layers.decoder import Decoder
from phalanx.layers.layer import DecoderLayer
from phalanx.runtime.moments import GpuMoments, Sent, moments_of

Hook = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a method what is called instead of it."""
Stamped = tuple[int, int, int]
"""What, its value, and when: ns of the host's clock, or which of a GPU's stamps."""

_PINGS = 20


class Tracer(Whereabouts):
    """Takes the place of a rank's page for as long as it is traced, and writes to that page as before.

    `marks` is where marks go now: those of the step that runs, or of a graph that is captured. What a GPU does outside
    of steps has no marks.
    """

    def __init__(self, model: Decoder, runner: Any) -> None:
        group = model.place.group
        self._page, self._numbers, self.look = group.where, group.where._numbers, group.where.look
        self._group, self._model = group, model
        self._steps: dict[int, tuple[StepMarks, list[Stamped]]] = {}
        self._sent: dict[int, Sent] = {}
        self._in_call = False
        self._hooks = Hooks()
        self.marks: list[Stamped] = []
        self._moments = moments_of(model)
        self.gpu = self._moments if isinstance(self._moments, GpuMoments) else None
        self._ahead = self._uncertain = 0
        if self.gpu is not None:
            self._ahead, self._uncertain = ahead_by_pings(self.gpu.pings(_PINGS))
            self._install_on_gpu(runner, self.gpu)
        self._install(runner)

    def _install(self, runner: object) -> None:
        self._group.where = self
        self._hooks.around(self._group, "all_reduce", self._call_of(ALL_REDUCE))
        self._hooks.around(self._group, "all_gather_columns", self._call_of(GATHER))
        if type(self._group).all_reduce_add_norm is not Group.all_reduce_add_norm:
            self._hooks.around(self._group, "all_reduce_add_norm", self._call_of(ALL_REDUCE))
        for layer in self._model.layers:
            self._hooks.around(layer, "in_one_call", self._halves_of(layer))
        self._hooks.around(self._model, "scores", self._then(SAMPLING))
        self._hooks.around(runner, "sampler", self._then(SAMPLED))

    def _install_on_gpu(self, runner: Any, gpu: GpuMoments) -> None:
        for group in nccl_groups(self._group):
            for name in ("all_reduce", "all_gather_columns"):
                self._hooks.around(group, name, _behind(gpu.before_foreign))
        if type(self._group).all_reduce_add_norm is Group.all_reduce_add_norm:
            self._hooks.around(self._group, "all_reduce_add_norm", self._norm_follows(gpu))
        self._hooks.around(runner, "launch", self._launched(gpu))
        if runner.draft_graphs is not None:
            self._hooks.around(runner.draft_graphs, "capture", self._no_part_of_it(gpu))

    def _norm_follows(self, gpu: GpuMoments) -> Hook:
        def make(sum_and_norm: Callable[..., Any]) -> Callable[..., Any]:
            def traced(*given: Any) -> Any:
                gpu.norm_follows = True
                try:
                    return sum_and_norm(*given)
                finally:
                    gpu.norm_follows = False

            return traced

        return make

    def _launched(self, gpu: GpuMoments) -> Hook:
        """Around the launch of a step, behind which its stamps are sent to the host."""

        def make(launch: Callable[[StepPlan], None]) -> Callable[[StepPlan], None]:
            def traced(plan: StepPlan) -> None:
                try:
                    launch(plan)
                finally:
                    gpu.stop()
                    self.marks = []
                if plan.step in self._steps:
                    sent = gpu.send()
                    if sent is None:
                        self.leave_out(plan.step)
                    else:
                        self._sent[plan.step] = sent

            return traced

        return make

    def _no_part_of_it(self, gpu: GpuMoments) -> Hook:
        """Around what a step may have to wait for."""

        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            def traced(*given: Any) -> Any:
                marks, self.marks = self.marks, []
                with gpu.off():
                    found = function(*given)
                self.marks = marks
                return found

            return traced

        return make

    def _call_of(self, kind: int) -> Hook:
        """Around a collective. One that is made of others counts once; among a single rank there are none."""
        moments = self._moments

        def make(call: Callable[..., Any]) -> Callable[..., Any]:
            def traced(tensor: Tensor, *more: Any) -> Any:
                if self._in_call:
                    return call(tensor, *more)
                self._in_call = True
                begun = moments.call_begins()
                self.marks.append((kind, tensor.nbytes, begun))
                try:
                    found = call(tensor, *more)
                finally:
                    self._in_call = False
                self.marks.append((CALL_ENDS, 0, moments.call_ends(begun)))
                return found

            return call if self._group.size == 1 else traced

        return make

    def _halves_of(self, layer: DecoderLayer) -> Hook:
        """Around a layer that may be computed in one call, which itself writes down when its FFN began."""

        def make(in_one_call: Callable[..., Any]) -> Callable[..., Any]:
            def traced(*given: Any) -> Any:
                done = in_one_call(*given)
                if done:
                    assert layer.whole is not None
                    self.marks.append((PLACE, 2 * layer.number + 1, layer.whole.halfway))
                return done

            return traced

        return make

    def _then(self, place: int) -> Hook:
        """Around what ends where this place begins."""
        moments = self._moments

        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            def traced(*given: Any) -> Any:
                found = function(*given)
                self.marks.append((PLACE, place, moments.here()))
                return found

            return traced

        return make

    def begin_step(self, number: int) -> None:
        super().begin_step(number)
        self.marks = []
        if self.gpu is not None:
            self.gpu.begin()
        self._steps[number] = StepMarks(number, time.monotonic_ns()), self.marks

    def end_step(self, number: int) -> None:
        super().end_step(number)
        if number in self._steps:
            step, stamped = self._steps[number]
            step.ended = time.monotonic_ns()
            if self.marks is stamped:
                self.marks = []

    def at(self, place: int) -> None:
        super().at(place)
        self.marks.append((PLACE, place, self._moments.at(place)))

    def replayed(self, marks: list[Stamped], used: int) -> None:
        """What a graph has marked that used so many places of this step, which had used none."""
        assert self.gpu is not None
        assert not self.gpu.used
        self.marks += marks
        self.gpu.used = used

    def leave_out(self, number: int) -> None:
        del self._steps[number]

    def end(self, in_graphs: int | None) -> RankTrace:
        """The page is in its place again. What was written down until now."""
        self._hooks.remove()
        self._group.where = self._page
        ended = [(step, stamped) for step, stamped in self._steps.values() if step.ended]
        for step, stamped in ended:
            step.marks = self._told(step.step, stamped)
        steps = [step for step, _ in ended]
        place = self._model.place
        device = "cpu" if place.device.type == "cpu" else torch.cuda.get_device_name(place.device)
        weights = place.layout.weight_bytes(self._group.rank, place.spec.number_format)
        quick = place.dtype != torch.float32
        return RankTrace(
            self._group.rank,
            part_names(self._model),
            steps,
            device,
            weights,
            in_graphs,
            uncertain=self._uncertain,
            flops=place.spec.flops_per_token() / self._group.size if quick else 0.0,
            multiplied="fp8" if place.spec.number_format == "fp8" else "bf16",
            pace=self._group.pace,
        )

    def _told(self, number: int, stamped: list[Stamped]) -> list[Mark]:
        """In the host's ns."""
        if self.gpu is None:
            return [Mark(*each) for each in stamped]
        stamps = self._sent[number].read()
        return [Mark(what, value, stamps[moment] - self._ahead) for what, value, moment in stamped]


def nccl_groups(group: Group | None) -> Iterator[NcclGroup]:
    """This one, or those that it is made of."""
    if isinstance(group, NcclGroup):
        yield group
    elif isinstance(group, TreeGroup):
        yield from nccl_groups(group.inner)
    elif isinstance(group, PeerGroup):
        yield from nccl_groups(group._large)


def _behind(first: Callable[[], None]) -> Hook:
    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*given: Any) -> Any:
            first()
            return function(*given)

        return traced

    return make


def part_names(model: Decoder) -> list[tuple[str, str]]:
    """The kinds of mixer and FFN of each layer, by the names of their records."""
    return [(type(layer.record.mixer).__name__, type(layer.record.ffn).__name__) for layer in model.layers]


def ahead_by_pings(pings: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """By how much another clock is ahead, and how far off that may be, of (sent, its time, heard) of some pings.

    Its time was taken somewhere between: in the middle, give or take half of the shortest one.
    """
    sent, there, heard = min(pings, key=lambda ping: ping[2] - ping[0])
    return there - (sent + heard) // 2, (heard - sent) // 2
