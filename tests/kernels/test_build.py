"""Kernels are built ahead of their first use, many at a time, and not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kernels_are_built_by_several_threads_and_none_is_launched(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    built = subprocess.run(
        [sys.executable, "-m", "tests.kernels.built_ahead"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert built.returncode == 0, built.stderr
