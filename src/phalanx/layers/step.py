"""StepContext: what all layers of a step share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, SightMasks
from phalanx.kernels.fp8 import Form
from phalanx.kernels.indexer import Best, Chosen
from phalanx.layers.adapters import StepAdapters
from phalanx.layers.rotary import Rotary
from phalanx.layers.watch import LayerWatch
from phalanx.spec.rope import Rope

Made = TypeVar("Made")


class StepContext:
    """Tokens and positions of the rows, how they meet the cache, and what is worked out once for several layers.

    `chosen` is what the last indexer made of the step. `rows` are those that it goes on with behind the last mixer.
    `watch` is shown the residual stream. `is_plain`: nobody adds to what layers do, or looks.
    """

    def __init__(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        block_size: int,
        dtype: torch.dtype,
        rotary: Rotary,
        adapters: StepAdapters | None = None,
        watch: LayerWatch | None = None,
    ) -> None:
        self.watch = watch
        self._tokens = tokens
        self.rows: Tensor | None = None
        self._adapters = adapters
        self.positions = positions
        self.batch = batch
        self.is_plain = adapters is None and watch is None
        self.masks = SightMasks(batch, block_size, dtype)
        self._rotary = rotary
        self.chosen: Best | Chosen | None = None
        self._turns: dict[Rope, tuple[Tensor, Tensor]] = {}
        self._made: dict[Hashable, Any] = {}

    @property
    def tokens(self) -> Tensor:
        """Of the rows that it goes on with."""
        return self._tokens if self.rows is None else self._tokens[self.rows]

    def adapters_of(self, rows: Tensor | None) -> StepAdapters | None:
        """Who goes by which adapter: of these rows, or of all."""
        adapters = self._adapters
        if adapters is None or rows is None:
            return adapters
        return self.once("adapters of the last rows", lambda: adapters.rows(rows))

    def form(self, takes: Form) -> Form:
        """Of what a part is given that takes this: adapters multiply it as it is computed."""
        return Form.BOTH if takes is Form.FP8 and self._adapters is not None else takes

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What the first layer that asks makes of the step, for all that ask by this key."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    def turns(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every row."""
        found = self._turns.get(rope)
        if found is None:
            found = self._turns[rope] = self._rotary(rope, self.positions)
        return found

    def turns_at(self, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same at other positions."""
        return self._rotary(rope, positions)
