"""EmulatedGroup: one rank of several without the others, so that its real share of the work can be timed alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.fabric.group import Group

_TRIAL_CYCLES = 10_000_000


class EmulatedGroup(Group):
    """Rank 0 of `size`. A collective takes as long as `seconds_of(bytes)` says, on the device's own queue.

    Sums are this rank's own part, so the tokens that come out mean nothing; the work and its time are real.
    """

    rank = 0
    in_graphs = True

    def __init__(self, size: int, seconds_of: Callable[[int], float], device: torch.device) -> None:
        self.size = size
        self.seconds = 0.0
        self.calls = 0
        self._seconds_of = seconds_of
        self._cycles_per_second = _cycles_per_second() if device.type == "cuda" else 0.0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._wait(tensor, tensor.nbytes)
        return tensor

    def all_gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """The other ranks' columns are such that none of their tokens is chosen."""
        self._wait(tensor, tensor.shape[0] * sum(widths) * tensor.element_size())
        whole = tensor.new_full((tensor.shape[0], sum(widths)), torch.finfo(tensor.dtype).min)
        whole[:, : tensor.shape[1]] = tensor
        return whole

    def _wait(self, tensor: Tensor, size: int) -> None:
        seconds = self._seconds_of(size)
        self.calls += 1
        if tensor.is_cuda:
            from phalanx.kernels.gpu.pause import pause

            pause(int(seconds * self._cycles_per_second))
            return
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        self.seconds += seconds

    def close(self) -> None:
        return None


def _cycles_per_second() -> float:
    """How many cycles the device counts in a second, timed."""
    from phalanx.kernels.gpu.pause import pause

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    pause(_TRIAL_CYCLES)
    begin.record()
    pause(_TRIAL_CYCLES)
    end.record()
    end.synchronize()
    return _TRIAL_CYCLES / (begin.elapsed_time(end) / 1e3)
