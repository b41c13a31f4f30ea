"""An engine whose ranks share one GPU: run with `pytest -m cuda`. No test may take longer than its time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.conftest import make_checkpoint
from tests.watchdog import run_all

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SECONDS = 90.0
"""Two engines in a row, each of which loads torch in its ranks and may have to compile all kernels."""


@pytest.mark.parametrize("family", ["llama3_rope", "qwen3_moe"])
def test_two_ranks_on_one_gpu_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    """With biases and tied embeddings, and with experts."""
    make_checkpoint(family, tmp_path)
    (told,) = run_all([["tests.runtime.shared_gpu", "tokens", str(tmp_path)]], tmp_path, SECONDS)
    found = json.loads(told.splitlines()[-1])
    assert found["graphs"], "decode steps run in graphs"
    assert found["2"] == found["1"]


@pytest.mark.parametrize("family", ["llama3_rope", "qwen3_moe"])
def test_two_ranks_on_one_gpu_give_the_bits_of_one(family: str, tmp_path: Path) -> None:
    """Six engines: in float32 and bfloat16, each prompt alone and all together."""
    make_checkpoint(family, tmp_path)
    (told,) = run_all([["tests.runtime.shared_gpu", "bits", str(tmp_path)]], tmp_path, 3 * SECONDS)
    found = json.loads(told.splitlines()[-1])
    for dtype in ("fp32", "bf16"):
        assert found[f"{dtype} 1 together"] == found[f"{dtype} 1 alone"]
        assert found[f"{dtype} 2 together"] == found[f"{dtype} 1 alone"]


def test_two_ranks_on_one_gpu_tell_their_collectives(tmp_path: Path) -> None:
    """None is left before the other rank has come, as far as their clocks are known."""
    make_checkpoint("llama3_rope", tmp_path)
    (told,) = run_all([["tests.runtime.shared_gpu", "traced", str(tmp_path)]], tmp_path, SECONDS)
    found = json.loads(told.splitlines()[-1])
    assert found["same"]
    assert sum(found["decodes"]) >= 3
    assert all(calls == ["all-reduce"] * (2 * found["layers"] + 1) + ["gather"] for calls in found["calls"])
    assert found["took"] > 0
    assert found["early"] <= found["uncertain"]


def test_a_rank_stopped_on_a_shared_gpu_is_named_by_what_the_gpus_count(tmp_path: Path) -> None:
    """In decode graphs, of which the hosts' books know nothing."""
    make_checkpoint("llama", tmp_path)
    (told,) = run_all([["tests.runtime.shared_gpu", "stopped", str(tmp_path)]], tmp_path, SECONDS)
    found = json.loads(told.splitlines()[-1])
    assert (found["code"], found["ranks"]) == ("rank_stopped", [1])
    waits = re.search(r"Rank 0 waits: step \d+, .* in .*, its GPU at meeting (\d+)\.", found["found"])
    assert waits, found["found"]
    assert int(waits[1]) > 100
    assert found["tokens"] == 100


def test_a_rank_killed_on_a_shared_gpu_is_named_and_the_gpu_stays_usable(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    (told,) = run_all([["tests.runtime.shared_gpu", "killed", str(tmp_path)]], tmp_path, SECONDS)
    found = json.loads(told.splitlines()[-1])
    assert found["code"] == "rank_died"
    assert "Rank 1 was killed by signal 9" in found["found"]
    assert len(found["tokens"]) == 4
