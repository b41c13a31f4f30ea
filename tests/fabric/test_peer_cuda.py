"""Ranks that share one GPU, and NCCL alone on it: run with `pytest -m cuda`. No test may take longer than its time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.watchdog import run_all

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SECONDS = 60.0


def ranks(what: str, size: int, folder: Path) -> list[str]:
    commands = [["tests.fabric.cuda_rank", what, str(folder), str(size), str(rank)] for rank in range(size)]
    return run_all(commands, folder, SECONDS)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_hundred_calls_of_all_kinds_and_sizes(size: int, dtype: str, tmp_path: Path) -> None:
    """Each rank holds its results against the definition; all print a digest of them, which are the same."""
    assert len(set(ranks(f"calls-{dtype}", size, tmp_path))) == 1


@pytest.mark.parametrize("size", [2, 4])
def test_fifty_replays_of_a_graph_with_fresh_inputs(size: int, tmp_path: Path) -> None:
    assert len(set(ranks("graph", size, tmp_path))) == 1


def test_a_group_lets_go_of_what_waits_for_a_rank_that_is_gone(tmp_path: Path) -> None:
    ranks("gone", 2, tmp_path)


def test_nccl_in_a_graph(tmp_path: Path) -> None:
    ranks("nccl", 1, tmp_path)
