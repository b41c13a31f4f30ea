"""TreeGroup: sums over ranks as one balanced tree, the top of the tree that each rank has a branch of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.engine.whereabouts import Whereabouts
from phalanx.fabric.group import Group
from phalanx.kernels.invariant import tree_sum


class TreeGroup(Group):
    """Any group, whose all-reduce gathers all parts and adds up neighbours first."""

    def __init__(self, inner: Group) -> None:
        self.inner = inner
        self.rank, self.size, self.in_graphs = inner.rank, inner.size, inner.in_graphs

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.inner.seconds

    @property
    def calls(self) -> int:  # type: ignore[override]
        return self.inner.calls

    @property
    def where(self) -> Whereabouts:  # type: ignore[override]
        return self.inner.where

    def all_reduce(self, tensor: Tensor) -> Tensor:
        rows = tensor.view(-1, tensor.shape[-1])
        gathered = self.inner.all_gather_columns(rows, [rows.shape[1]] * self.size)
        return tree_sum(gathered.chunk(self.size, 1)).view(tensor.shape)

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        return self.inner.all_gather_columns(tensor, widths)

    def wait_for(self, event: torch.cuda.Event) -> None:
        self.inner.wait_for(event)

    def close(self) -> None:
        self.inner.close()
