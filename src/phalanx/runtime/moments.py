"""Moments of a step, as a tracer writes them down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.engine.marks import MOST_STEPS
from phalanx.engine.whereabouts import HEAD
from phalanx.layers.decoder import Decoder
from phalanx.layers.stream import Around, Ends


class HostMoments:
    """A CPU works while it is asked to: a moment is what its clock says, in ns."""

    def at(self, place: int) -> int:
        """A part of the step begins."""
        return time.monotonic_ns()

    def here(self) -> int:
        return time.monotonic_ns()

    def call_begins(self) -> int:
        return time.monotonic_ns()

    def call_ends(self, begun: int) -> int:
        return time.monotonic_ns()


class Sent(NamedTuple):
    """What a step has stamped, on its way to the host: there once the device has come to `done`."""

    stamps: Tensor
    done: torch.cuda.Event

    def read(self) -> list[int]:
        self.done.synchronize()
        found: list[int] = self.stamps.flatten().tolist()
        return found


MOST_PLACES = 4096
_STEPS_ON_THEIR_WAY = 4


class GpuMoments:
    """A GPU works later. A moment is the number of a stamp among those that the step's kernels leave in `places`, two
    in each (`kernels.gpu.stamps`).

    All steps use the same places, from the first on, and so do all graphs: behind each step its stamps are copied, on
    the queue and so ahead of the next one's. The kernels that begin the places `told` can stamp.
    """

    def __init__(self, device: torch.device, told: frozenset[int]) -> None:
        from phalanx.kernels.gpu import stamps

        self._stamps = stamps
        self._told = told
        self._places = torch.zeros(MOST_PLACES, 2, dtype=torch.int64, device=device)
        steps = MOST_STEPS + _STEPS_ON_THEIR_WAY
        self._on_host = torch.zeros(steps, MOST_PLACES, 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._sent = 0
        self.used = 0
        self._is_on = False
        self._was_foreign = False
        self.norm_follows = False
        """Whether the kernel behind the collective that runs is a norm's."""

    def begin(self) -> None:
        """A step begins, or a graph's recording."""
        self._stamps.want(None)
        self.used, self._is_on, self._was_foreign = 0, True, False

    def stop(self) -> None:
        """What is launched from here on is no part of a step."""
        self._stamps.want(None)
        self._is_on = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """What is launched inside is no part of the step that it runs in."""
        wanted, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = wanted

    def send(self) -> Sent | None:
        """Of the step that has just been launched. None where there were more moments, or steps, than there is room."""
        number, self._sent = self._sent, self._sent + 1
        if number >= len(self._on_host) or self.used > MOST_PLACES:
            return None
        sent = self._on_host[number, : self.used]
        sent.copy_(self._places[: self.used], non_blocking=True)
        return Sent(sent, torch.cuda.current_stream().record_event())

    def at(self, place: int) -> int:
        return self._by_next_kernel() if place in self._told else self.here()

    def here(self) -> int:
        """Whatever kernel comes next, the moment is now in the queue."""
        moment = self._by_next_kernel()
        if self._stamps.is_wanted():
            self._stamps.stamp()
        return moment

    def call_begins(self) -> int:
        """The kernels of our own collectives stamp both of their ends."""
        return self._by_next_kernel()

    def call_ends(self, begun: int) -> int:
        if not self._was_foreign and not self._stamps.is_wanted():
            return begun + 1
        self._was_foreign = False
        return self._by_next_kernel() if self.norm_follows else self.here()

    def before_foreign(self) -> None:
        """A kernel follows that others wrote."""
        if self._stamps.is_wanted():
            self._stamps.stamp()
        self._was_foreign = True

    def _by_next_kernel(self) -> int:
        """When the kernel that is launched next begins, and it can stamp. As long as none is launched, all moments are
        this one.
        """
        if self._is_on and not self._stamps.is_wanted():
            self.used += 1
            self._stamps.want(self._places[min(self.used, MOST_PLACES) - 1])
        return 2 * (self.used - 1)

    def pings(self, times: int) -> list[tuple[int, int, int]]:
        """Of each when it was sent, what the GPU's clock said, and when that was heard, by the host's clock."""
        moments = []
        for number in range(times):
            self._stamps.want(self._places[number])
            sent = time.monotonic_ns()
            self._stamps.stamp()
            torch.cuda.current_stream().synchronize()
            moments.append((sent, time.monotonic_ns()))
        told = self._places[:times, 0].tolist()
        return [(sent, there, heard) for (sent, heard), there in zip(moments, told, strict=True)]


def moments_of(model: Decoder) -> HostMoments | GpuMoments:
    device = model.place.device
    return GpuMoments(device, told_by_norms(model)) if device.type == "cuda" else HostMoments()


def told_by_norms(model: Decoder) -> frozenset[int]:
    """Places whose first kernel is a norm's, or that of a sum before it. A companion's have the same numbers."""
    decoders = [model] if model.companion is None else [model, model.companion]
    halves: list[tuple[int, Any]] = [
        half
        for decoder in decoders
        for layer in decoder.all_layers
        for half in ((2 * layer.number, layer.around_mixer), (2 * layer.number + 1, layer.around_ffn))
    ]
    silent = {place for place, around in halves if not isinstance(around, Around) or around.before is None}
    normed = all(isinstance(decoder.ends, Ends) and decoder.draft_head is None for decoder in decoders)
    return frozenset({place for place, _ in halves} - silent | ({HEAD} if normed else set()))
