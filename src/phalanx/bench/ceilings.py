"""What this machine can do: the two ceilings every speed is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.fp8 import GROUP, Fp8Weight, converts_e4m3, quantise_blocks
from phalanx.kernels.gemm import Fp8Gemm, PanelGemm
from phalanx.kernels.quantise import quantise
from phalanx.quant import at_work
from phalanx.spec import Scheme

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


def measure_ceilings(device: torch.device, dtype: torch.dtype, scheme: Scheme | None = None) -> Ceilings:
    """Memory: the better of a large copy (bytes read and written) and a large sum (bytes read).

    The product is one of `dtype` matrices, or, where weights are held in a `scheme`, the one that they are multiplied
    by. An engine on this GPU may have left little memory.
    """
    on_gpu = device.type == "cuda"
    size = min(2**30, torch.cuda.mem_get_info(device)[0] // 16) if on_gpu else 2**26
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _best(lambda: target.copy_(source), device)
    summed = source.nbytes / _best(lambda: source.sum(), device)
    side = 8192 if on_gpu else 1024
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = 2 * side**3 / _best(_product(left, right, scheme), device)
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return Ceilings(name, max(copied, summed), product)


def _product(left: Tensor, right: Tensor, scheme: Scheme | None) -> Callable[[], object]:
    """GPUs multiply FP8 as it is, and widen weights of four bits on the way; CPUs have a product for all they hold."""
    if scheme is not None and not left.is_cuda:
        return _panel_product(left, scheme)
    if scheme is not None and scheme.kind == "fp8" and left.dtype != torch.float32 and converts_e4m3(left.device):
        return _fp8_product(left, right)
    return lambda: left @ right


def _panel_product(left: Tensor, scheme: Scheme) -> Callable[[], object]:
    """Its time does not depend on the values, but for those that are no numbers: all are zero."""
    panels = at_work(scheme).empty((), [left.shape[1]], left.shape[1], left.device).panels()
    for part in (panels.codes, panels.scales, panels.minimums):
        if part is not None:
            part.zero_()
    gemm = PanelGemm(panels)
    return lambda: gemm(left)


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
