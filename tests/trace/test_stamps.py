"""Kernels that write down the GPU's clock for a trace, and the steps that are made of them; without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.apart import run_apart

pytestmark = pytest.mark.slow


def test_every_moment_is_stamped_by_the_first_kernel_behind_it() -> None:
    """Of graphs and of steps kernel by kernel; models with and without norms, streams in the place of one, and all
    kinds of collectives.
    """
    run_apart("stamped_steps", interpret=False)


def test_only_a_kernel_that_is_traced_reads_the_clock(tmp_path: Path) -> None:
    run_apart("stamped_kernels", interpret=False, TRITON_CACHE_DIR=str(tmp_path))
