"""Builds kernels ahead of their use for a Hopper that is not there. Run by `test_build.py` in a process of its own."""

from __future__ import annotations

import threading

import torch
import triton
from triton.backends.compiler import GPUTarget

from phalanx.kernels.gpu import gemm, sampling
from phalanx.kernels.gpu.build import built_not_run


class NoDriver:
    """Says what Triton asks before it builds. Whoever launched a kernel would want more of it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    triton.runtime.driver.set_active(NoDriver())
    builders: set[int] = set()
    compile_one = triton.compiler.compile

    def noted(*args: object, **options: object) -> object:
        builders.add(threading.get_ident())
        return compile_one(*args, **options)

    triton.compiler.compile = noted
    scores = torch.randn(3, 5000, dtype=torch.bfloat16)
    x, weight = torch.randn(1, 256, dtype=torch.bfloat16), torch.randn(64, 256, dtype=torch.bfloat16)
    with built_not_run(4):
        for _ in range(2):
            assert sampling.likeliest(scores).tolist() == [0, 0, 0]
            assert sampling.likeliest(scores.float()).tolist() == [0, 0, 0]
            gemm.matrix_vector(x, weight, None)
    built = [sampling._best_of_stretch, sampling._best_of_all, gemm._matrix_vector]
    assert [len(kernel.device_caches[0][0]) for kernel in built] == [2, 1, 1], "each is built, and once"
    assert len(builders) > 1, "one thread built them all"
    assert threading.get_ident() not in builders
    try:
        sampling.likeliest(scores)
    except AttributeError:
        return
    raise AssertionError("outside, a kernel is launched: there is nothing to launch it on")


if __name__ == "__main__":
    main()
