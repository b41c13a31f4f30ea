"""How fast one device copies and multiplies: the best of several sizes and repeats, on random numbers.

Zeros would flatter: they flip no bits, so a GPU draws less power and clocks higher. A GPU is kept busy before the clock
runs, because an idle one takes a while to raise its own clocks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.doctor.measure.messages import Rated

_WARM_S = 0.25
_REPEATS = 12
_MIB = 2**20
_GPU_COPIES = (512 * _MIB, 1024 * _MIB)
_GPU_PRODUCTS = (4096, 8192)
_CPU_COPIES = (64 * _MIB, 128 * _MIB)
_CPU_PRODUCTS = (512, 1024, 2048)
_CPU_REPEATS = 5
_SHARE_OF_FREE = 8
"""A copy takes twice its size; one this part of what is free leaves room for whoever else uses the GPU."""
_FP8_SINCE = (8, 9)

Measurable = Callable[[], object]
Timer = Callable[[Measurable], float]


def rate_cpu() -> Rated:
    """The CPU with the threads that torch takes by default, as serving with one rank does. Products are in float32."""
    copy = max(_copied(torch.rand(size // 4), _cpu_best) for size in _CPU_COPIES)
    product = max(
        _multiplied(width, torch.randn(width, width), torch.randn(width, width), _cpu_best) for width in _CPU_PRODUCTS
    )
    return Rated("CPU", None, copy, {"fp32": product})


def rate_gpu(index: int) -> Rated:
    """One GPU: products in bf16, and in FP8 where it has that."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    sizes = [min(size, free // _SHARE_OF_FREE) for size in _GPU_COPIES]
    copy = max(_copied(torch.randn(size // 2, device=device, dtype=torch.bfloat16), _gpu_best) for size in sizes)
    products = {"bf16": max(_bf16_product(width, device) for width in _GPU_PRODUCTS)}
    if torch.cuda.get_device_capability(device) >= _FP8_SINCE:
        with contextlib.suppress(RuntimeError):  # this torch was built without it
            products["fp8"] = max(fp8_product(width, device, _gpu_best) for width in _GPU_PRODUCTS)
    return Rated(properties.name, str(properties.uuid), copy, products)


def _copied(source: Tensor, best: Timer) -> float:
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source)) / 1e9


def _multiplied(width: int, a: Tensor, b: Tensor, best: Timer) -> float:
    product = torch.empty_like(a)
    return 2 * width**3 / best(lambda: torch.mm(a, b, out=product)) / 1e12


def _bf16_product(width: int, device: torch.device) -> float:
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    return _multiplied(width, a, b, _gpu_best)


def fp8_product(width: int, device: torch.device, best: Timer) -> float:
    """TFLOP/s of FP8 by FP8 with one scale a matrix, the plainest product there is in that format."""
    a, b = (torch.randn(width, width, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one, whole = torch.ones((), device=device), F.ScalingType.TensorWise
    seconds = best(lambda: F.scaled_mm(a, b.t(), one, whole, one, whole, use_fast_accum=device.type == "cuda"))
    return 2 * width**3 / seconds / 1e12


def _gpu_best(work: Measurable) -> float:
    """Seconds of the fastest repeat, by events on the GPU's own stream."""
    _warm_up(work, torch.cuda.synchronize)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
    for start, end in pairs:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in pairs) / 1e3


def _cpu_best(work: Measurable) -> float:
    _warm_up(work, lambda: None)
    seconds = []
    for _ in range(_CPU_REPEATS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _warm_up(work: Measurable, wait: Callable[[], object]) -> None:
    until = time.monotonic() + _WARM_S
    while True:
        work()
        wait()
        if time.monotonic() > until:
            return
