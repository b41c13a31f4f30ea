"""Compressed attention and hyper-connections by the GPU's kernels at the sizes of real models: `pytest -m cuda`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from phalanx.kernels.gpu import compressed
from tests.kernels.compressed_steps import Step, Where, check_attention, check_kept, check_streams, check_turned

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HALF, WIDE = Where("cuda", torch.bfloat16, 1e-2, 64), Where("cuda", torch.float32, 1e-4, 64)
PROMPTS = [(0, 130), (700, 200), (127, 2), (513, 65)]


@pytest.mark.parametrize("where", [HALF, WIDE], ids=["half", "wide"])
def test_heads_are_normed_and_turned(where: Where) -> None:
    for tokens, heads, width in ((1, 64, 512), (70, 1, 512), (3, 64, 128), (5, 9, 100)):
        check_turned(where, tokens, heads, width)


@pytest.mark.parametrize(("ratio", "halves", "width"), [(4, 2, 512), (4, 2, 128), (128, 1, 512)])
@pytest.mark.parametrize("where", [HALF, WIDE], ids=["half", "wide"])
def test_entries_and_rings(where: Where, ratio: int, halves: int, width: int) -> None:
    check_kept(where, Step([4, 128, 1000, 7, 256], PROMPTS, 16, "cuda"), ratio, halves, width)
    check_kept(where, Step([4, 128, 1024, 8], [], 16, "cuda"), ratio, halves, width)


@pytest.mark.parametrize("heads", [64, 8, 5])
@pytest.mark.parametrize(("ratio", "top"), [(0, None), (128, None), (4, None), (4, 64)])
def test_decode(heads: int, ratio: int, top: int | None) -> None:
    for rows in (1, 8, 64):
        lengths = ([1500, 1, 127, 128, 129, 400, 64, 3] * 8)[:rows]
        check_attention(HALF, Step(lengths, [], 16, "cuda"), heads, 512, 128, ratio, top=top)


def test_decode_of_a_long_sequence() -> None:
    check_attention(HALF, Step([60_000, 2, 129], [], 16, "cuda"), 64, 512, 128, 128)
    check_attention(HALF, Step([20_000], [], 16, "cuda"), 64, 512, 128, 4, top=512)


@pytest.mark.parametrize("heads", [64, 5])
@pytest.mark.parametrize(("ratio", "top"), [(0, None), (128, None), (4, 64)])
def test_prompts(heads: int, ratio: int, top: int | None) -> None:
    check_attention(HALF, Step([1000, 1], PROMPTS, 16, "cuda"), heads, 512, 128, ratio, slack=4, top=top)


def test_in_float32() -> None:
    check_attention(WIDE, Step([300, 1], [(0, 40), (130, 9)], 16, "cuda"), 12, 64, 20, 4, top=16)


@pytest.mark.parametrize("where", [HALF, WIDE], ids=["half", "wide"])
def test_streams(where: Where) -> None:
    for tokens, hidden in ((1, 4096), (33, 7168), (3, 100)):
        check_streams(where, tokens, 4, hidden, 20, False)
    check_streams(where, 2, 4, 4096, 20, True)


def test_a_graph_serves_other_positions_than_it_was_captured_with() -> None:
    step = Step([999, 64, 1], [], 16, "cuda")
    positions = step.rows.positions.clone()
    rows = replace(step.rows, positions=positions)
    q, new, ring = HALF.randn(3, 64, 512), HALF.randn(3, 512), HALF.randn(step.places, 128, 512)
    entries, sinks = HALF.randn(step.blocks, 4, 512), HALF.wide(64)

    def attend() -> Tensor:
        return compressed.attend(q, new, ring, entries, 4, 16, rows, 128, None, sinks, 0.05)

    wanted = attend()
    positions.zero_()
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    positions.copy_(step.rows.positions)
    graph.replay()
    assert torch.equal(found, wanted)
