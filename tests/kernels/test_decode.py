"""Decode attention as it is built for a GPU; `test_gpu.py` and `test_gpu_cache.py` hold it against its definition."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_an_fp8_cache_is_not_read_byte_by_byte() -> None:
    """Compilers like to widen values only after they are where the tensor cores want them."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.compiled_decode"]
    built = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert built.returncode == 0, built.stderr
