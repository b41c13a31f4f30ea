"""Kernels that start before the one ahead has ended (programmatic dependent launch), where a GPU can: from Hopper."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl  # noqa: F401  (the interpreter wants to see it)
from triton.language.extra import cuda
from triton.language.target_info import cuda_capability_geq, current_target


@triton.jit
def let_next_start():
    """The next kernel may start now; it waits for what this one writes."""
    if cuda_capability_geq(9, 0):
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_ahead():
    """From here on all that the kernel ahead wrote is there."""
    if cuda_capability_geq(9, 0):
        cuda.gdc_wait()


@cache
def starts_early() -> bool:
    """Whether to launch kernels so."""
    target = current_target()
    return target is not None and target.arch >= 90
