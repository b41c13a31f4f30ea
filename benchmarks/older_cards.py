"""Runs tests of the GPU kernels as they are built for an older card: `python benchmarks/older_cards.py`.

Wrappers and Triton are told that the GPU is such a card, and the driver compiles the PTX that Triton makes for it.
Tests of kernels that such a card is not given (FP8 below 8.9, products that only Hopper streams) are left out. All
files run at once, each in a process of its own; the exit status is 1 if any fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
CHOSEN = [
    ("test_gpu.py", "bfloat16 and (norm or silu or rotate or matrix_vector or likeliest or test_route or 33-)"),
    ("test_gpu.py", "test_decode_attention and bfloat16 and (None or 7)"),
    ("test_gpu.py", "test_prefill_attention and bfloat16 and (None or 40)"),
    ("test_gpu.py", "test_fused_experts and bfloat16 and not fp8"),
    ("test_gpu.py", "widened_in_the_product"),
    ("test_latent_cuda.py", "20-192-256 or latents_are_kept or graph"),
    ("test_latent_cuda.py", "128-128-128 or chosen or long_sequences"),
    ("test_compressed_cuda.py", ""),
    ("test_four_bit.py", "test_products_on_a_gpu and bfloat16 and not nvfp4 and (1- or 17- or 128-)"),
    ("test_four_bit.py", "test_experts_on_a_gpu and not nvfp4 and False"),
    ("test_delta_kernels.py", "dtype1 and 16-"),
    ("test_draw_cuda.py", "test_tokens_are_those and 33-"),
    ("test_invariant_kernels.py", "on_a_gpu and bfloat16"),
]
"""Files of tests/kernels, and which of their tests."""


def pretend(capability: int) -> None:
    """From here on the GPU is such a card, as far as anybody asks."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.compiler.compiler import CompiledKernel

    major, minor = divmod(capability, 10)
    real, begin = torch.cuda.get_device_properties, CompiledKernel.__init__

    def told(device: Any = None) -> SimpleNamespace:
        facts = real(device)
        named = {name: getattr(facts, name) for name in dir(facts) if not name.startswith("_")}
        return SimpleNamespace(**(named | {"major": major, "minor": minor}))

    def with_ptx(kernel: Any, *args: Any, **options: Any) -> None:
        begin(kernel, *args, **options)
        kernel.kernel = kernel.asm["ptx"].encode() + b"\0"

    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", told),
        (torch.cuda, "get_device_capability", lambda device=None: (major, minor)),
        (CudaDriver, "get_current_target", lambda self: GPUTarget("cuda", capability, 32)),
        (CompiledKernel, "__init__", with_ptx),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)


def run_tests(capability: int, file: str, chosen: str) -> int:
    import pytest

    pretend(capability)
    wanted = ["-k", chosen] if chosen else []
    return int(
        pytest.main(["-m", "cuda", "-q", "-x", "-p", "no:cacheprovider", *wanted, str(ROOT / "tests/kernels" / file)])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=80)
    parser.add_argument("--file", help="one file alone, in this process")
    parser.add_argument("--chosen", default="")
    asked = parser.parse_args()
    if asked.file:
        return run_tests(asked.capability, asked.file, asked.chosen)
    begun, failed = time.monotonic(), False
    with tempfile.TemporaryDirectory() as built:
        environment = os.environ | {"TRITON_CACHE_DIR": built, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        this = [sys.executable, __file__, f"--capability={asked.capability}"]
        to_all = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment, "cwd": ROOT}
        started: list[Any] = [
            subprocess.Popen([*this, f"--file={name}", f"--chosen={chosen}"], **to_all) for name, chosen in CHOSEN
        ]
        for (name, chosen), process in zip(CHOSEN, started, strict=True):
            output, _ = process.communicate()
            print(f"{name} ({chosen or 'all'}): {output.strip()[-200:].splitlines()[-1:]}", flush=True)
            if process.returncode:
                print(output[-3000:])
                failed = True
    print(f"{'some fail' if failed else 'all pass'}, built for {asked.capability}, in {time.monotonic() - begun:.0f} s")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
