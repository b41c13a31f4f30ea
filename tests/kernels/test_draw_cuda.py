"""The kernels that draw tokens, on a GPU. Run with `pytest -m cuda`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.kernels.sampling import draw, draw_torch
from tests.kernels.drawing import LatentQueries, distance, mixed, table_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def random_scores(rows: int, width: int, dtype: torch.dtype, spread: float) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(rows * 7 + width)
    return (torch.randn(rows, width, device="cuda", generator=generator) * spread).to(dtype)


def both(scores: Tensor, asked: list[LatentQueries]) -> tuple[list[int], list[int]]:
    """Tokens of the kernels and of the definition, at positions that are the rows' numbers."""
    rows, table = torch.arange(len(asked), device="cuda"), table_of(asked).cuda()
    return draw(scores, table, rows, rows).tolist(), draw_torch(scores, table, rows, rows).tolist()


def check(scores: Tensor, asked: list[LatentQueries]) -> None:
    found, wanted = both(scores, asked)
    wrong = [row for row in range(len(asked)) if found[row] != wanted[row]]
    strays = {row: distance(scores[row].cpu(), asked[row], row, found[row]) for row in wrong}
    assert len(wrong) <= 1 + 0.001 * len(asked), [(asked[row], found[row], wanted[row], strays[row]) for row in wrong]
    assert all(stray < 1e-6 for stray in strays.values()), strays


@DTYPES
@pytest.mark.parametrize("width", [128256, 151936, 32000, 500])
@pytest.mark.parametrize("rows", [1, 2, 33, 257])
def test_tokens_are_those_of_the_definition(rows: int, width: int, dtype: torch.dtype) -> None:
    """Any mix of parameters. A token may differ where the random number lies on a border, within rounding of it."""
    for spread in (0.5, 3.0) if rows < 257 else (2.0,):
        check(random_scores(rows, width, dtype, spread), mixed(rows, seed=rows + width))


@DTYPES
@pytest.mark.parametrize(
    "asked",
    [
        LatentQueries(),
        LatentQueries(0.8, top_p=0.95),
        LatentQueries(top_k=50),
        LatentQueries(0.6, 20, 0.95),
        LatentQueries(top_p=0.99, min_p=0.01),
    ],
    ids=str,
)
def test_thousands_of_draws(asked: LatentQueries, dtype: torch.dtype) -> None:
    """Scores as peaked as a model's: a heavy tail over a wide vocabulary."""
    scores = random_scores(8, 128256, torch.float32, 1.0)
    scores = (scores + 3 * random_scores(8, 128256, torch.float32, 1.0).abs() ** 1.5).to(dtype)
    check(scores.repeat(256, 1), [asked._replace(seed=seed) for seed in range(8 * 256)])


@pytest.mark.parametrize("spread", [0.0, 1e-3, 30.0])
def test_more_candidates_than_there_is_room_for(spread: float) -> None:
    """All scores alike, or nearly so, or a top-k beyond what the peaks of chunks can bound."""
    kinds = [
        LatentQueries(top_p=0.9),
        LatentQueries(top_k=100_000),
        LatentQueries(top_k=5000, top_p=0.7),
        LatentQueries(1.5, 900),
        LatentQueries(min_p=0.3),
    ]
    check(random_scores(5, 151936, torch.bfloat16, spread), [kind._replace(seed=9) for kind in kinds])


def test_rows_with_few_possible_tokens() -> None:
    scores = torch.full((6, 128256), float("-inf"), device="cuda")
    scores[:5, 77_777] = -3.0
    scores[:3, 5] = -2.5
    scores[3, 128255] = float("inf")
    scores[4, 9] = float("nan")
    asked = [
        LatentQueries(top_k=50),
        LatentQueries(top_p=0.9),
        LatentQueries(min_p=0.1),
        LatentQueries(),
        LatentQueries(top_k=3, top_p=0.5),
        LatentQueries(),
    ]
    found, _ = both(scores, asked)
    assert all(token in (5, 77_777) for token in found[:3])
    assert found[3:] == [128255, 77_777, 0]


def test_both_dtypes_and_any_company_give_the_same_tokens() -> None:
    """Weights are whole numbers: sums do not depend on how a kernel is laid out."""
    scores, asked = random_scores(64, 128256, torch.bfloat16, 2.0), mixed(64)
    rows, table = torch.arange(64, device="cuda"), table_of(asked).cuda()
    together = draw(scores, table, rows, rows)
    for _ in range(5):
        assert torch.equal(draw(scores, table, rows, rows), together)
    assert torch.equal(draw(scores.float(), table, rows, rows), together)
    for row in range(64):
        alone = rows[row : row + 1]
        assert torch.equal(draw(scores[row : row + 1], table, alone, alone), together[row : row + 1])


def test_random_numbers_of_all_seeds_are_those_of_the_definition() -> None:
    """A flat row of many tokens shows the first digits of the number."""
    asked = [LatentQueries(seed=seed) for seed in (0, 1, -1, 42, 2**63 - 1, -(2**63), 123456789012345678)]
    found, wanted = both(torch.zeros(len(asked), 262144, device="cuda"), asked)
    assert all(abs(one - other) <= 1 for one, other in zip(found, wanted, strict=True))
