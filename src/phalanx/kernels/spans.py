"""The prompts of a step one by one, and masks to be added to scores: for definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, PrefillRow, visible


def spans(batch: AttentionBatch, block_size: int) -> list[PrefillRow]:
    """The prompts of a step, on a GPU too."""
    if batch.tiles is None:
        return batch.prefills
    starts: dict[int, list[int]] = {}
    for sequence, first, count, start, _ in batch.tiles.tiles.tolist():
        if count:
            known = starts.setdefault(sequence, [first, first + count, start])
            known[:] = min(known[0], first), max(known[1], first + count), min(known[2], start)
    tables = batch.tiles.tables
    return [
        PrefillRow(
            first,
            stop - first,
            start,
            tables[sequence, : -(-(start + stop - first) // block_size)].long(),
            sequence,
        )
        for sequence, (first, stop, start) in starts.items()
    ]


def causal(row: PrefillRow, dtype: torch.dtype) -> Tensor:
    positions = torch.arange(row.start + row.count, device=row.blocks.device)
    return additive(visible(positions[row.start :, None], positions, None), dtype)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
