"""StepContext: what all layers of a step share."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, Masks
from phalanx.kernels.latent import Chosen
from phalanx.layers.rotary import Rotary
from phalanx.spec.rope import Rope


class StepContext:
    """Positions of the rows, how they meet the cache, and what is worked out once for several layers.

    `chosen` is what the last indexer made of the step.
    """

    def __init__(
        self, positions: Tensor, batch: AttentionBatch, block_size: int, dtype: torch.dtype, rotary: Rotary
    ) -> None:
        self.positions = positions
        self.batch = batch
        self.masks = Masks(batch, block_size, dtype)
        self._rotary = rotary
        self.chosen: Chosen | None = None
        self._turns: dict[Rope, tuple[Tensor, Tensor]] = {}

    def turns(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every row."""
        if rope not in self._turns:
            self._turns[rope] = self._rotary(rope, self.positions)
        return self._turns[rope]
