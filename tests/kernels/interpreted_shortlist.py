"""Candidates are found and looked at again as defined, by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels import shortlist
from phalanx.kernels.gpu import shortlist as gpu
from phalanx.kernels.gpu.gemm import counters
from phalanx.kernels.shortlist import best_of_ranks_torch, look_again_torch
from tests.kernels.interpreter import backwards, make_ready


def whole_numbers(*shape: int) -> Tensor:
    """So few of them that many a score ties, and sums are exact."""
    return torch.randint(-2, 3, shape).float()


def check(scores: Tensor, hidden: Tensor, weight: Tensor, first: int = 0) -> Tensor:
    expected, same = scores.clone(), scores.clone()
    wanted = look_again_torch(expected, hidden, weight, first)
    found = gpu.look_again(same, hidden, weight, first)
    assert torch.equal(found.tokens, wanted.tokens), (found, wanted)
    assert torch.equal(found.scored, wanted.scored)
    assert torch.equal(same.nan_to_num(7e4), expected.nan_to_num(7e4))
    assert not counters(scores.device).any(), "for whoever comes next"
    return found.tokens


def check_size(rows: int, width: int, inputs: int, dtype: torch.dtype) -> None:
    hidden, weight = whole_numbers(rows, inputs).to(dtype), whole_numbers(width, inputs).to(dtype)
    for noise in (0, 3):
        scores = hidden @ weight.T + noise * torch.randn(rows, width).round().to(dtype)
        check(scores, hidden, weight, first=7)
    check(torch.zeros_like(scores), hidden, weight)


def check_broken_scores() -> None:
    rows, width, inputs = 6, 700, 40
    hidden, weight = whole_numbers(rows, inputs), whole_numbers(width, inputs)
    scores = hidden @ weight.T
    scores[0], scores[1], scores[2] = float("nan"), float("-inf"), float("inf")
    scores[3, ::2] = float("nan")
    scores[4, 33], weight[33, 0] = float("inf"), float("inf")
    hidden[5] = float("nan")
    tokens = check(scores, hidden, weight)
    assert ((tokens >= 0) & (tokens < width)).all()


def check_ranks(rows: int, ranks: int) -> None:
    scored = torch.stack((whole_numbers(rows, ranks), torch.randperm(rows * ranks).view(rows, ranks).float()), 2)
    scored[0, :, 0] = torch.finfo(torch.float32).min
    scored[0, -1] = torch.tensor([float("-inf"), torch.finfo(torch.float32).min])
    scored[-1] = torch.finfo(torch.float32).min
    assert torch.equal(gpu.best_of_ranks(scored.flatten(1)), best_of_ranks_torch(scored.flatten(1)))


if __name__ == "__main__":
    make_ready()
    torch.manual_seed(0)
    check_size(1, 2600, 24, torch.float32)
    gpu.COMBS = shortlist.COMBS = 64
    check_size(3, 7, 33, torch.float32)
    check_size(2, 64, 33, torch.float32)
    check_size(2, 257, 96, torch.float16)
    gpu.SCORES = 128
    with backwards():
        check_size(2, 1500, 64, torch.float32)
    check_broken_scores()
    check_ranks(5, 3)
    check_ranks(2, 8)
