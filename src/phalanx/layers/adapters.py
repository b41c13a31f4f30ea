"""Adapters at work: what LoRA adds to a product, for the rows of a step that ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.fp8 import Activations, InBoth, Quantised, dequantise


class Added(NamedTuple):
    """What an adapter adds to a product, on this rank: `up` @ `down`, scaled already. Where several matrices are one
    product, their parts lie beside each other in `down`, and in `up` each in its own rows, with zeros elsewhere.
    """

    down: Tensor
    up: Tensor

    @classmethod
    def beside(cls, parts: Sequence[tuple[Tensor, Tensor] | None], rows: Sequence[int]) -> Added:
        """Of the matrices of a product that have these heights; some may not be adapted."""
        present = [part for part in parts if part is not None]
        nothing = present[0][1].new_zeros
        ups = [part[1] if part else nothing(height, 0) for part, height in zip(parts, rows, strict=True)]
        return cls(torch.cat([down for down, _ in present]), torch.block_diag(*ups))


class StepAdapters:
    """Which rows of a step go by which adapter: a number a row, 0 for none. `active` are those that occur.

    All adapters that are active in a product are one pair of products: `x` by all of `down`, zeros where an adapter is
    not the row's own, then by all of `up`. Rows without one get zeros added.
    """

    def __init__(self, active: Sequence[int], of_row: Tensor) -> None:
        self.active = active
        self.of_row = of_row
        self._owns: dict[tuple[tuple[int, int], ...], Tensor] = {}

    def rows(self, rows: Tensor) -> StepAdapters:
        """The same for some of the rows."""
        return StepAdapters(self.active, self.of_row[rows])

    def add(self, out: Tensor, x: Activations, held: Mapping[int, Added]) -> Tensor:
        """What a product gives, with what its adapters add."""
        found = [(number, held[number]) for number in self.active if number in held]
        if not found:
            return out
        if isinstance(x, InBoth):
            x = x.plain
        elif isinstance(x, Quantised):
            x = dequantise(x.values, x.scales, 1, out.dtype)
        down, up = torch.cat([added.down for _, added in found]), torch.cat([added.up for _, added in found], 1)
        own = self._own(tuple((number, len(added.down)) for number, added in found), out.dtype)
        return torch.addmm(out, (x @ down.T) * own, up.T)

    def _own(self, widths: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Tensor:
        """1 where a column is of the row's own adapter, 0 elsewhere; worked out once for all products alike."""
        if widths not in self._owns:
            columns = [number for number, width in widths for _ in range(width)]
            owners = torch.tensor(columns, device=self.of_row.device)
            self._owns[widths] = (self.of_row[:, None] == owners).to(dtype)
        return self._owns[widths]
