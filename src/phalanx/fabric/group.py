"""Groups of ranks and the two collectives a step needs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

RENDEZVOUS_TIMEOUT = timedelta(seconds=60)
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class FabricError(RuntimeError):
    """A collective failed: some peer is gone. The peer's own report says why."""


class Group(Protocol):
    rank: int
    size: int
    seconds: float
    """Spent in collectives so far, by the host's clock."""
    in_graphs: bool
    """Whether its collectives may be captured in a CUDA graph."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place, the same bits on every rank."""
        ...

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """Every rank's columns side by side in rank order; rank r brings `widths[r]` of them."""
        ...

    def close(self) -> None: ...


class Solo:
    """The group of one."""

    rank = 0
    size = 1
    seconds = 0.0
    in_graphs = True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        return tensor

    def close(self) -> None:
        return None


class GlooGroup:
    """Ranks on one machine, over loopback. Not torch's default group, so several engines can live in one process."""

    in_graphs = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.seconds = 0.0

    def connect(self, folder: Path) -> None:
        """Meet the other ranks through a private folder. Every rank must come."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = COLLECTIVE_TIMEOUT
        store = dist.FileStore(str(folder / "rendezvous"), self.size)
        store.set_timeout(RENDEZVOUS_TIMEOUT)
        try:
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise FabricError(str(error)) from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._collective():
            self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        rows, widest = tensor.shape[0], max(widths)
        padded = tensor.new_zeros(rows, widest)
        padded[:, : tensor.shape[1]] = tensor
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        with self._collective():
            self._group.allgather([gathered], [padded]).wait()
        return torch.cat([part[:, :width] for part, width in zip(gathered, widths, strict=True)], dim=1)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise FabricError(str(error)) from error
        finally:
            self.seconds += time.perf_counter() - began

    def close(self) -> None:
        self.__dict__.pop("_group", None)
