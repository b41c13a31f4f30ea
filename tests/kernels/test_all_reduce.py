"""Collectives over peer memory, run by Triton's interpreter: real processes, real flags, host memory for GPU memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RANKS = 3

pytest.importorskip("triton")


def test_ranks_meet_add_up_and_gather_in_shared_memory(tmp_path: Path) -> None:
    """Calls of alternating kinds and sizes, one behind the other, by ranks of different speeds."""
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.kernels.interpreted_rank", str(tmp_path), str(RANKS)]
    ranks = [subprocess.Popen([*command, str(rank)], env=variables, stderr=subprocess.PIPE) for rank in range(RANKS)]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=200)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
