"""Faults that a rank commits when it is told to, by the environment or by a call: `raise 1@2`, or `mute 1@40`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.fabric.host import HostGroup
from phalanx.kernels import cpu
from phalanx.layers.decoder import Decoder, DecoderLayer
from phalanx.layers.stream import Stream
from phalanx.runtime import pulse
from phalanx.runtime.weight_watch import WeightWatch

FAULT = "RANK_FAULT"


def commit_fault(told: str) -> None:
    """`raise RANK@LAYER` fails in the middle of a layer; `mute RANK@ROUND` is not heard from a meeting on.

    `flip RANK@LAYER` flips one bit of the residual stream in the fifth step, `garble RANK@CALL` one of every sum that
    it hears from a collective on; `weight RANK@LAYER` one of a weight after loading. `impatient RANK@SECONDS`
    misses the engine so soon.
    """
    kind, _, place = told.partition(" ")
    rank, number = map(int, place.split("@"))
    faults = {
        "raise": _raise,
        "mute": _mute,
        "flip": _flip,
        "garble": _garble,
        "weight": _weight,
        "impatient": _impatient,
    }
    faults[kind](rank, number)


def _raise(rank: int, layer: int) -> None:
    forward = DecoderLayer.__call__

    def failing(self: DecoderLayer, *inputs: Any) -> None:
        if self.group.rank == rank and self.number == layer:
            self.ffn = None  # type: ignore[assignment]
        forward(self, *inputs)

    DecoderLayer.__call__ = failing  # type: ignore[method-assign]


def _mute(rank: int, first: int) -> None:
    """Its flag does not rise any more, though it sees those of the others."""
    meet = cpu.meet

    def deaf(flags: Tensor, own: int, ranks: int, round: int, looks: int) -> bool:
        if own != rank or round < first:
            return meet(flags, own, ranks, round, looks)
        stolen = flags.clone()
        return meet(stolen, own, ranks, round, looks)

    cpu.meet = deaf


def flip_bit(tensor: Tensor, bit: int) -> None:
    """Of all bits that a tensor has."""
    size = 8 * tensor.itemsize
    word = tensor.view(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    word[bit // size] ^= torch.tensor(1, dtype=word.dtype) << bit % size


def _flip(rank: int, layer: int) -> None:
    forward, seen = DecoderLayer.__call__, []

    def flipping(self: DecoderLayer, stream: Stream, *inputs: Any) -> None:
        if self.group.rank == rank and self.number == layer:
            seen.append(None)
            if len(seen) == 5:
                flip_bit(stream.residual, 37)
        forward(self, stream, *inputs)

    DecoderLayer.__call__ = flipping  # type: ignore[method-assign]


def _garble(rank: int, first: int) -> None:
    reduce = HostGroup.all_reduce

    def garbled(self: HostGroup, tensor: Tensor) -> Tensor:
        reduce(self, tensor)
        if self.rank == rank and self.calls >= first:
            flip_bit(tensor, 40)
        return tensor

    HostGroup.all_reduce = garbled  # type: ignore[method-assign]


def _weight(rank: int, layer: int) -> None:
    make = WeightWatch.__init__

    def damaging(self: WeightWatch, model: Decoder) -> None:
        make(self, model)
        if model.place.group.rank == rank:
            flip_bit(dict(model.parts())[f"model.layers.{layer}.mlp.down_proj.weight"], 3)

    WeightWatch.__init__ = damaging  # type: ignore[method-assign]


def _impatient(rank: int, seconds: int) -> None:
    pulse.ENGINE_LOST_AFTER_S = float(seconds)
