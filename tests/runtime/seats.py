"""Requests seated in a batch, as the sampler finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.engine.masks import pack
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.runtime.batch import Batch
from phalanx.runtime.sampler import SamplingRows


@dataclass(frozen=True)
class Seat:
    """A request that wants the token of a position; `history` is what the pool holds of it."""

    params: SamplingParams
    position: int = 1
    seed: int = 7
    prompt_length: int = 1
    history: Sequence[int] = (0,)
    mask: bytes | None = None


def seated(
    seats: Sequence[Seat], device: str = "cpu", order: Sequence[int] | None = None
) -> tuple[Batch, SamplingRows]:
    """Each in the slot of its number, with rows in this order of slots."""
    length = max(max(seat.position, len(seat.history)) for seat in seats)
    blocks = -(-length // 8)
    batch = Batch(len(seats), length, 8, len(seats) * blocks, torch.device(device))
    admissions = [
        Admission(slot, seat.prompt_length, list(seat.history), seat.seed, seat.params)
        for slot, seat in enumerate(seats)
    ]
    slots = list(range(len(seats)) if order is None else order)
    masks = {slot: seat.mask for slot, seat in enumerate(seats) if seat.mask is not None}
    plan = StepPlan(
        1,
        admissions,
        slots=slots,
        starts=[seats[slot].position - 1 for slot in slots],
        counts=[1] * len(seats),
        samples=[1] * len(seats),
        new_blocks=[(slot, list(range(slot * blocks, (slot + 1) * blocks))) for slot in range(len(seats))],
        masks=[(row, slot) for row, slot in enumerate(slots) if slot in masks],
        new_masks=[(slot, pack(mask)) for slot, mask in masks.items()],
    )
    batch.take_in(batch.read(plan))
    return batch, SamplingRows.of(plan, batch)
