"""HostGroup: ranks on the CPUs of one machine, over memory that they share."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.engine.whereabouts import ALL_REDUCE, GATHER
from phalanx.fabric.group import Check, FabricError, Group, collective, nothing_to_say
from phalanx.kernels import cpu

_MEMORY_FOLDER = Path("/dev/shm")
_LINE_BYTES = 64
_SLOT_BYTES = 2**20
_LOOKS = 6_000
"""How often a rank looks for the others before it asks whether they are alive: 4,000 times awake, then it sleeps
between looks, a quarter of a second in all.
"""


class HostGroup(Group):
    """A rank puts its part into a slot of its own, meets the others, and reads all slots.

    There are two slots for each rank, used in turn: one meeting a round is enough. Who writes a slot again has met the
    others in the round between, and they came there only after they had read it.
    """

    in_graphs = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.seconds = 0.0
        self.calls = 0
        self._round = 0
        self._check: Check = nothing_to_say
        self._flags = self._slots = torch.empty(0)

    def connect(self, store: Store, host: str, check: Check = nothing_to_say) -> None:
        """Map one file into every rank. It has no name any more once all have come, and goes with the last of them."""
        self._check = check
        length = self.size * (_LINE_BYTES + 2 * _SLOT_BYTES)
        try:
            area = torch.frombuffer(
                _map_file(PrefixStore("host", store), self.rank, self.size, length), dtype=torch.uint8
            )
        except (OSError, RuntimeError) as error:
            raise FabricError(f"ranks cannot share memory: {error}") from error
        self._flags = area[: self.size * _LINE_BYTES]
        self._slots = area[self.size * _LINE_BYTES :].view(2, self.size, _SLOT_BYTES)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with collective(self, ALL_REDUCE):
            for piece in tensor.view(-1).split(_SLOT_BYTES // tensor.itemsize):
                first, *others = self._exchange(piece)
                piece.copy_(first)
                for other in others:
                    piece += other
        return tensor

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        rows, at_once = tensor.shape[0], _SLOT_BYTES // (max(widths) * tensor.itemsize)
        gathered = tensor.new_empty(rows, sum(widths))
        with collective(self, GATHER):
            for first in range(0, rows, at_once):
                piece = tensor[first : first + at_once].contiguous()
                height = piece.shape[0]
                parts = self._exchange(piece.view(-1), [height * width for width in widths])
                columns = [part.view(height, width) for part, width in zip(parts, widths, strict=True)]
                torch.cat(columns, 1, out=gathered[first : first + height])
        return gathered

    def _exchange(self, piece: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Every rank's piece, to be read before the next exchange."""
        self._round += 1
        slots = self._slots[self._round % 2].view(piece.dtype)
        slots[self.rank, : len(piece)] = piece
        while not cpu.meet(self._flags, self.rank, self.size, self._round, _LOOKS):
            self._check()
        return [slot[:size] for slot, size in zip(slots, sizes or [len(piece)] * self.size, strict=True)]

    def close(self) -> None:
        self._flags = self._slots = torch.empty(0)


def _map_file(shelf: Store, rank: int, size: int, length: int) -> mmap.mmap:
    """Rank 0 makes the file and takes its name away when all have opened it."""
    if rank > 0:
        descriptor = os.open(shelf.get("file").decode(), os.O_RDWR)
        shelf.set(f"opened {rank}", "")
        return _mapped(descriptor, length)
    descriptor, path = _new_file(length)
    try:
        shelf.set("file", path)
        shelf.wait([f"opened {other}" for other in range(1, size)])
    finally:
        os.unlink(path)
    return _mapped(descriptor, length)


def _new_file(length: int) -> tuple[int, str]:
    """In memory with all its pages, or, where a container has too little for that, among temporary files."""
    if _MEMORY_FOLDER.is_dir():
        descriptor, path = tempfile.mkstemp(prefix="phalanx-", dir=_MEMORY_FOLDER)
        try:
            os.posix_fallocate(descriptor, 0, length)
            return descriptor, path
        except OSError:
            os.close(descriptor)
            os.unlink(path)
    descriptor, path = tempfile.mkstemp(prefix="phalanx-")
    os.ftruncate(descriptor, length)
    return descriptor, path


def _mapped(descriptor: int, length: int) -> mmap.mmap:
    area = mmap.mmap(descriptor, length)
    os.close(descriptor)
    return area
