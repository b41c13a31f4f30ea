"""Kernels build for cards that are not here: some of them, for the oldest and the newest; `make kernels` builds all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kernels_build_for_ampere_and_blackwell(tmp_path: Path) -> None:
    """In a process of its own: the driver that tells of the card stays there."""
    pytest.importorskip("triton")
    built = subprocess.run(
        [sys.executable, "benchmarks/kernels.py", "--kernel", "rows", "--target", "80", "120"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert built.returncode == 0, built.stderr
    assert built.stdout.count("all build") == 2
