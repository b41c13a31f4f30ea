"""How pairs of token and expert are sorted; what experts compute is held against its definition in `test_gpu.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_the_kernels_sort_as_defined() -> None:
    """In Triton's interpreter; on a GPU `test_gpu.py` says more."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.interpreted_experts"]
    subprocess.run(command, check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2])
