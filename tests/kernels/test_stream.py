"""The kernel for few rows can be built; what it computes is held against its definition in `test_gpu.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_the_installed_triton_builds_it_for_hopper() -> None:
    """Gluon changes its names from version to version."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.compiled_stream"]
    built = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert built.returncode == 0, built.stderr
