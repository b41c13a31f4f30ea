"""Tracer: a rank's page that also writes down when each part of a step began."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.engine.marks import CALL_ENDS, PLACE, SAMPLED, SAMPLING, Hooks, Mark, RankTrace, StepMarks
from phalanx.engine.whereabouts import ALL_REDUCE, GATHER, Whereabouts
from phalanx.fabric.group import Group
from phalanx.layers.decoder import Decoder
from phalanx.layers.layer import DecoderLayer

Stamped = tuple[int, int, Any]
"""What, its value, and when: ns of the host's clock, or an event of the device's queue."""


class DeviceStamps:
    """Moments on a GPU's queue, inside of graphs too. They are told in ns of the host's clock, by one moment at which
    both were known.
    """

    def __init__(self) -> None:
        self._zero = self()
        self._zero.synchronize()
        self._zero_ns = time.monotonic_ns()

    def __call__(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event

    def ns(self, event: torch.cuda.Event) -> int:
        event.synchronize()
        return self._zero_ns + int(self._zero.elapsed_time(event) * 1e6)


class Tracer(Whereabouts):
    """Takes the place of a rank's page for as long as it is traced, and writes to that page as before.

    `marks` is where marks go now: those of the step that runs, or of a graph that is captured.
    """

    def __init__(self, model: Decoder, runner: object) -> None:
        group = model.place.group
        self._page, self._numbers, self.look = group.where, group.where._numbers, group.where.look
        self._group, self._model = group, model
        self._device = DeviceStamps() if model.place.device.type == "cuda" else None
        self._now: Callable[[], Any] = self._device or time.monotonic_ns
        self._steps: dict[int, tuple[StepMarks, list[Stamped]]] = {}
        self._in_call = False
        self._hooks = Hooks()
        self.marks: list[Stamped] = []
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

    def _call_of(self, kind: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Around a collective. One that is made of others counts once; among a single rank there are none."""
        now = self._now

        def make(call: Callable[..., Any]) -> Callable[..., Any]:
            def traced(tensor: Tensor, *more: Any) -> Any:
                if self._in_call:
                    return call(tensor, *more)
                self._in_call = True
                self.marks.append((kind, tensor.nbytes, now()))
                try:
                    return call(tensor, *more)
                finally:
                    self._in_call = False
                    self.marks.append((CALL_ENDS, 0, now()))

            return call if self._group.size == 1 else traced

        return make

    def _halves_of(self, layer: DecoderLayer) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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

    def _then(self, place: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Around what ends where this place begins."""

        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            def traced(*given: Any) -> Any:
                found = function(*given)
                self.marks.append((PLACE, place, self._now()))
                return found

            return traced

        return make

    def begin_step(self, number: int) -> None:
        super().begin_step(number)
        self.marks = []
        self._steps[number] = StepMarks(number, time.monotonic_ns()), self.marks

    def end_step(self, number: int) -> None:
        """Marks of a GPU are told now: a graph that is replayed again writes over them. Others wait until the end."""
        super().end_step(number)
        if number in self._steps:
            step, stamped = self._steps[number]
            step.ended = time.monotonic_ns()
            if self._device is not None:
                step.marks = [Mark(what, value, self._device.ns(moment)) for what, value, moment in stamped]
                stamped.clear()
            elif self.marks is stamped:
                self.marks = []

    def at(self, place: int) -> None:
        super().at(place)
        self.marks.append((PLACE, place, self._now()))

    def leave_out(self, number: int) -> None:
        del self._steps[number]

    def end(self, in_graphs: int | None) -> RankTrace:
        """The page is in its place again. What was written down until now."""
        self._hooks.remove()
        self._group.where = self._page
        for step, stamped in self._steps.values():
            step.marks = step.marks or [Mark(*each) for each in stamped]
        steps = [step for step, _ in self._steps.values() if step.ended]
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
            flops=place.spec.flops_per_token() / self._group.size if quick else 0.0,
            multiplied="fp8" if place.spec.number_format == "fp8" else "bf16",
            pace=self._group.pace,
        )


def part_names(model: Decoder) -> list[tuple[str, str]]:
    """The kinds of mixer and FFN of each layer, by the names of their records."""
    return [(type(layer.record.mixer).__name__, type(layer.record.ffn).__name__) for layer in model.layers]


def ahead_by_pings(pings: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """By how much another clock is ahead, and how far off that may be, of (sent, its time, heard) of some pings.

    Its time was taken somewhere between: in the middle, give or take half of the shortest one.
    """
    sent, there, heard = min(pings, key=lambda ping: ping[2] - ping[0])
    return there - (sent + heard) // 2, (heard - sent) // 2
