"""TreeGroup: sums over ranks as one balanced tree, the top of the tree that each rank has a branch of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.engine.whereabouts import Whereabouts
from phalanx.fabric.group import Group
from phalanx.kernels.invariant import join_ranks


class TreeGroup(Group):
    """Any group, whose all-reduce gathers all parts, adds up neighbours first, and rounds what comes of it to `dtype`.

    Parts come in float32: rounded before the last sum, they would tell how many ranks there are.
    """

    def __init__(self, inner: Group, dtype: torch.dtype) -> None:
        self.inner = inner
        self.dtype = dtype
        self.rank, self.size, self.in_graphs = inner.rank, inner.size, inner.in_graphs

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.inner.seconds

    @property
    def calls(self) -> int:  # type: ignore[override]
        return self.inner.calls

    @property
    def where(self) -> Whereabouts:
        return self.inner.where

    @where.setter
    def where(self, page: Whereabouts) -> None:
        self.inner.where = page

    def all_reduce(self, tensor: Tensor) -> Tensor:
        rows = tensor.view(-1, tensor.shape[-1])
        gathered = self.inner.all_gather_columns(rows, [rows.shape[1]] * self.size)
        return join_ranks(gathered, self.size, self.dtype).view(tensor.shape)

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        return self.inner.all_gather_columns(tensor, widths)

    def wait_for(self, event: torch.cuda.Event) -> None:
        self.inner.wait_for(event)

    def close(self) -> None:
        self.inner.close()
