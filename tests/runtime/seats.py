"""Requests seated in a batch, as the sampler finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.engine.plan import Admission, StepPlan
from phalanx.engine.sampling import SamplingParams
from phalanx.runtime.batch import Batch
from phalanx.runtime.sampler import SamplingRow


@dataclass(frozen=True)
class Seat:
    """A request that wants the token of a position; `history` is what the pool holds of it."""

    params: SamplingParams
    position: int = 1
    seed: int = 7
    prompt_length: int = 1
    history: Sequence[int] = (0,)
    mask: bytes | None = None


def seated(seats: Sequence[Seat], device: str = "cpu") -> tuple[Batch, list[SamplingRow]]:
    length = max(max(seat.position, len(seat.history)) for seat in seats)
    batch = Batch(len(seats), length, 8, 0, torch.device(device))
    admissions = [
        Admission(slot, seat.prompt_length, list(seat.history), seat.seed, seat.params)
        for slot, seat in enumerate(seats)
    ]
    batch.update(StepPlan(1, admissions, [], [], [], [], []))
    rows = []
    for slot, seat in enumerate(seats):
        occupant = batch.occupants[slot]
        assert occupant is not None
        rows.append(SamplingRow(occupant, slot, seat.position, seat.mask))
    return batch, rows
