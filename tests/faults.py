"""Faults that a rank commits when the environment tells it to: `raise 1@2`, or `mute 1@40`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phalanx.kernels import cpu
from phalanx.layers.decoder import DecoderLayer

FAULT = "RANK_FAULT"


def commit_fault(told: str) -> None:
    """`raise RANK@LAYER` fails in the middle of a layer; `mute RANK@ROUND` is not heard from a meeting on."""
    kind, _, place = told.partition(" ")
    rank, number = map(int, place.split("@"))
    {"raise": _raise, "mute": _mute}[kind](rank, number)


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
