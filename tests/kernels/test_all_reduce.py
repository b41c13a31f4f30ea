"""Collectives over peer memory, run by Triton's interpreter: real processes, real flags, host memory for GPU memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.apart import Apart

pytestmark = pytest.mark.slow

RANKS = 3


def test_ranks_meet_add_up_and_gather_in_shared_memory(tmp_path: Path) -> None:
    """Calls of alternating kinds and sizes, one behind the other, by ranks of different speeds."""
    ranks = [Apart("interpreted_rank", str(tmp_path), str(RANKS), str(rank)) for rank in range(RANKS)]
    for rank in ranks:
        rank.join()
