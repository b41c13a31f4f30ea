"""The measuring process with one fault or none, named by the environment: in its memory, its link or its life."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.doctor.measure import collectives, rates, worker
from phalanx.doctor.measure.messages import MeasureAssignment, MeasureReport
from phalanx.fabric.group import GlooGroup

FAULT = os.environ["FAULT"]
CHECKED_BYTES = 8192


class FaultyGroup(GlooGroup):
    """In sums of 8 KiB rank 1 flips a bit of int32, rank 2 the sign of a float32 zero, rank 0 sends a wrong bf16."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes != CHECKED_BYTES:
            return super().all_reduce(tensor)
        if self.rank == 1 and tensor.dtype == torch.int32:
            _end()
        if self.rank == 0 and tensor.dtype == torch.bfloat16 and FAULT == "corrupts":
            tensor[5] += 1
        super().all_reduce(tensor)
        if self.rank == 1 and tensor.dtype == torch.int32 and FAULT == "corrupts":
            tensor[17] ^= 1 << 9
        if self.rank == 2 and tensor.dtype == torch.float32 and FAULT == "corrupts":
            tensor[(tensor == 0).nonzero()[:1]] = -0.0
        return tensor


def _end() -> None:
    if FAULT == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "raises":
        raise ValueError("the GPU fell off the bus")


def _late(assignment: MeasureAssignment) -> Iterator[MeasureReport]:
    if assignment.rank == 1:
        time.sleep(3600)
    yield from collectives.all_reduces(assignment)


def main() -> None:
    collectives._EXACT[torch.float32] = 3  # so that there are zeros
    rates._CPU_COPIES, rates._CPU_PRODUCTS = (rates._MIB,), (256,)
    collectives.GlooGroup = FaultyGroup  # type: ignore[misc]
    if FAULT == "never begins":
        worker.all_reduces = _late  # type: ignore[assignment]
    worker.main()


if __name__ == "__main__":
    main()
