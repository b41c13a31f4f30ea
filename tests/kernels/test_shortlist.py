"""The best of a head's outputs is found among a few candidates: by definition, by the kernels, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.kernels.candidates import CANDIDATES, COMBS
from phalanx.kernels.four_bit import FourBitWeight
from phalanx.kernels.gemm import FourBitGemm
from phalanx.kernels.shortlist import best_of_ranks, look_again, look_again_torch
from tests.kernels.apart import run_apart

NAN = float("nan")
LAST_BITS = 0.1
"""Of scores up to 16 in bfloat16, some of which are the sum in another order."""


def test_the_kernels_find_what_the_definition_finds() -> None:
    run_apart("interpreted_shortlist")


def near_scores(rows: int, width: int, noise: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a weight, the scores these have, and scores that are a little off. The best are neighbours, as
    frequent tokens are.
    """
    generator = torch.Generator().manual_seed(width)
    hidden = torch.randn(rows, 64, generator=generator)
    weight = torch.randn(width, 64, generator=generator)
    weight[:100] *= 2
    exact = hidden @ weight.T
    return hidden, weight, exact, exact + noise * torch.randn(rows, width, generator=generator)


def candidates_of(scores: Tensor) -> set[int]:
    """Of one row, in plain Python."""
    row = scores.tolist()
    best = [max(range(comb, len(row), COMBS), key=row.__getitem__) for comb in range(COMBS)]
    return set(sorted(best, key=row.__getitem__)[-CANDIDATES:])


def test_candidates_alone_are_scored_again_and_the_best_of_them_is_found() -> None:
    hidden, weight, exact, near = near_scores(20, 3000, 4.0)
    scores = near.clone()
    tokens = look_again(scores, hidden, weight, first=100).tokens
    for row, token in enumerate(tokens.tolist()):
        changed = (scores[row] != near[row]).nonzero()[:, 0].tolist()
        assert set(changed) == candidates_of(near[row])
        assert token - 100 == max(changed, key=exact[row].tolist().__getitem__)
    torch.testing.assert_close(scores[scores != near], exact[scores != near])
    assert (tokens - 100 != near.argmax(1)).any()


def test_the_best_is_found_by_scores_that_are_a_little_off() -> None:
    hidden, weight, exact, near = near_scores(400, 3000, 2.0)
    right = exact.argmax(1)
    assert (near.argmax(1) == right).float().mean() < 0.9
    assert (look_again(near, hidden, weight).tokens == right).float().mean() > 0.99


def test_the_first_of_equals_is_found_and_what_is_no_number_never() -> None:
    weight = torch.zeros(300, 2)
    weight[[20, 40, 250], 0] = 1.0
    weight[270] = NAN
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0], [NAN, 1.0]])
    scores = hidden @ weight.T
    scores[0, 270] = 5.0
    assert look_again(scores, hidden, weight).tokens.tolist()[:2] == [20, 0]
    assert scores[0, 270].isnan()


def test_ranks_agree_on_the_best_of_all() -> None:
    least = torch.finfo(torch.float32).min
    scored = torch.tensor([[1.0, 5.0, 2.0, 90.0], [3.0, 80.0, 3.0, 7.0], [float("-inf"), 4.0, least, least]])
    assert best_of_ranks(scored).tolist() == [90, 7, 0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("width", "inputs"), [(248320, 2048), (16160, 7168), (5003, 96)])
def test_a_look_again_on_a_gpu(width: int, inputs: int) -> None:
    weight = (torch.randn(width, inputs, device="cuda") * 0.02).bfloat16()
    product = FourBitGemm(FourBitWeight.of(weight), None, torch.bfloat16)
    for rows in (1, 4, 33, 64):
        hidden = torch.randn(rows, inputs, device="cuda").bfloat16()
        near = product(hidden)
        scores, expected = near.clone(), near.clone()
        found, wanted = look_again(scores, hidden, weight, 9), look_again_torch(expected, hidden, weight, 9)
        assert (scores - expected).abs().max() < LAST_BITS
        assert (found.scored - wanted.scored)[:, 0].abs().max() < LAST_BITS
        assert torch.equal(found.tokens.float(), found.scored[:, 1])
        best = (hidden @ weight.T).float().amax(1)
        assert (best - found.scored[:, 0] < LAST_BITS).float().mean() > 0.95
