"""What this machine can do: the two ceilings every speed is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.fp8 import GROUP, Fp8Weight, quantise_blocks
from phalanx.kernels.gemm import Fp8Gemm
from phalanx.kernels.quantise import quantise

_REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """Measured bytes per second through memory and floating-point operations per second of a large product."""

    device: str
    bytes_per_s: float
    flops_per_s: float

    def seconds(self, moved_bytes: float, flops: float) -> float:
        """The least time for this work: whichever of the two takes longer."""
        return max(moved_bytes / self.bytes_per_s, flops / self.flops_per_s)


def measure_ceilings(device: torch.device, dtype: torch.dtype, fp8: bool = False) -> Ceilings:
    """Memory: the better of a large copy (bytes read and written) and a large sum (bytes read).

    The product is one of `dtype` matrices, or of block-FP8 ones. An engine on this GPU may have left little memory.
    """
    on_gpu = device.type == "cuda"
    size = min(2**30, torch.cuda.mem_get_info(device)[0] // 16) if on_gpu else 2**26
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _best(lambda: target.copy_(source), device)
    summed = source.nbytes / _best(lambda: source.sum(), device)
    side = 8192 if on_gpu else 1024
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    multiply = _fp8_product(left, right) if fp8 else lambda: left @ right
    product = 2 * side**3 / _best(multiply, device)
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return Ceilings(name, max(copied, summed), product)


def _fp8_product(left: Tensor, right: Tensor) -> Callable[[], object]:
    weight = Fp8Weight.empty(*right.shape, row_block=GROUP, device=right.device)
    weight.fill(*quantise_blocks(right))
    x, gemm = quantise(left), Fp8Gemm(weight, None, left.dtype)
    return lambda: gemm(x)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
