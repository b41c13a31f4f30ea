"""Tokens are drawn as the parameters say, by the definition and by the kernels in Triton's interpreter alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.engine.output import NO_TOKEN
from phalanx.kernels.sampling import draw, flag_broken_torch, likeliest
from tests.kernels.apart import run_apart
from tests.kernels.drawing import KINDS, LatentQueries, distance, mixed, probabilities, table_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def randn(rows: int, width: int, dtype: torch.dtype = torch.float32, spread: float = 2.0, seed: int = 0) -> Tensor:
    return (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def drawn(scores: Tensor, asked: list[LatentQueries], positions: Tensor | None = None) -> list[int]:
    rows = torch.arange(len(asked))
    return draw(scores, table_of(asked), rows, rows if positions is None else positions).tolist()


@DTYPES
@pytest.mark.parametrize(("width", "spread"), [(500, 2.0), (3, 1.0), (1, 1.0), (4097, 0.3), (2000, 6.0)])
def test_each_token_is_the_one_that_its_random_number_points_at(width: int, spread: float, dtype: torch.dtype) -> None:
    """In half precision with many ties, which stay together at every cut."""
    asked = mixed(400, seed=width)
    scores = randn(400, width, dtype, spread, seed=width)
    tokens = drawn(scores, asked)
    strays = [distance(scores[row], asked[row], row, token) for row, token in enumerate(tokens)]
    assert max(strays) < 1e-6
    assert sum(stray > 0 for stray in strays) <= 0.001 * len(strays)


@pytest.mark.parametrize("asked", [kind for kind in KINDS if kind.temperature > 0], ids=str)
def test_tokens_come_as_often_as_they_should(asked: LatentQueries) -> None:
    """Chi-square over what is expected 5 times or more, against a bound that one case in a million passes."""
    draws, width = 20_000, 40
    scores = randn(1, width, spread=1.5)
    rows = torch.zeros(draws, dtype=torch.int64)
    tokens = draw(scores.expand(draws, width), table_of([asked._replace(seed=11)]), rows, torch.arange(draws))
    expected = probabilities(scores[0], asked) * draws
    found = np.bincount(tokens.numpy(), minlength=width)
    assert not found[expected == 0].any()
    often = expected >= 5
    free = int(often.sum())
    assert ((found - expected)[often] ** 2 / expected[often]).sum() < free + 5 * (2 * free) ** 0.5 + 20


def test_equal_scores_are_cut_together() -> None:
    scores = torch.tensor([[1.0, 5.0, 5.0, 0.0, 5.0, 1.0]]).repeat(300, 1)
    for asked, possible in (
        (LatentQueries(top_k=2), {1, 2, 4}),
        (LatentQueries(top_k=4), {0, 1, 2, 4, 5}),
        (LatentQueries(top_p=0.01), {1, 2, 4}),
        (LatentQueries(min_p=1.0), {1, 2, 4}),
        (LatentQueries(top_k=1, top_p=0.1, min_p=0.5), {1, 2, 4}),
    ):
        assert set(drawn(scores, [asked] * 300)) == possible
    assert drawn(scores[:1], [LatentQueries(temperature=0.0)]) == [1]


def test_what_cannot_be_is_never_drawn_and_rows_without_a_finite_best_give_their_first_best() -> None:
    scores = torch.full((6, 100), float("-inf"))
    scores[0, 7] = scores[1, 7] = scores[1, 70] = -1e30
    scores[2, 5] = float("inf")
    scores[3, 9] = torch.finfo(torch.float32).min
    scores[5, 1], scores[5, 2] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
    tokens = drawn(scores, [LatentQueries(top_k=50, top_p=0.9)] * 6)
    assert tokens == [7, tokens[1], 5, 9, 0, 1]
    assert tokens[1] in {7, 70}


def test_a_row_is_drawn_alike_alone_and_in_company() -> None:
    asked, scores = mixed(64), randn(64, 300)
    together = drawn(scores, asked)
    for row in range(64):
        assert drawn(scores[row : row + 1], asked[row : row + 1], torch.tensor([row])) == [together[row]]


def test_parameters_are_looked_up_by_slot() -> None:
    table = table_of(
        [LatentQueries(top_k=1), LatentQueries(temperature=0.0), LatentQueries(seed=3), LatentQueries(seed=4)]
    )
    scores, positions = torch.zeros(1, 5000).index_fill_(1, torch.tensor([4000]), 1.0), torch.tensor([9])
    one, greedy, third, fourth, spare = (int(draw(scores, table, torch.tensor([slot]), positions)) for slot in range(5))
    assert one == greedy == spare == 4000
    assert len({one, third, fourth}) == 3


@pytest.mark.parametrize(
    ("room", "width", "dtype", "kinds"),
    [(1024, 700, torch.float32, KINDS), (16, 333, torch.bfloat16, [KINDS[2], KINDS[3], KINDS[4], KINDS[6]])],
    ids=["room for all candidates", "room for few"],
)
@pytest.mark.slow
def test_the_kernels_draw_what_the_definition_draws(
    tmp_path: Path, room: int, width: int, dtype: torch.dtype, kinds: list[LatentQueries]
) -> None:
    """In Triton's interpreter, with rows of several stretches."""
    scores, rows = randn(len(kinds), width, dtype), torch.arange(len(kinds))
    scores[1, 100:] = float("-inf")
    scores[2, :300] = float("-inf")
    scores[3, 5] = float("nan")
    table, positions = table_of([kind._replace(seed=index - 5) for index, kind in enumerate(kinds)]), rows * 1000
    broken = scores.clone()
    broken[0], broken[1, 7], broken[2] = float("nan"), float("inf"), float("-inf")
    save_file({"scores": scores, "broken": broken, "table": table, "positions": positions}, tmp_path / "case")
    run_apart("interpreted_draw", str(tmp_path), str(room))
    found, sound = load_file(tmp_path / "found"), scores.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    assert found["drawn"].tolist() == draw(sound, table, rows, positions).tolist()
    assert found["likeliest"].tolist() == likeliest(sound).tolist()
    assert found["flagged"].tolist() == [NO_TOKEN] * 3 + likeliest(sound)[3:].tolist()
    assert found["flagged"].tolist() == flag_broken_torch(likeliest(broken.nan_to_num(posinf=9e9)), broken).tolist()
