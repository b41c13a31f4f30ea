"""How experts are chosen and pairs of token and expert sorted; what experts compute is held against its definition in
`test_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch

from phalanx.spec.ffn import Router
from tests.kernels.apart import run_apart


@pytest.mark.slow
def test_the_kernels_choose_and_sort_as_defined() -> None:
    """In Triton's interpreter."""
    run_apart("interpreted_experts")


def test_norm_router_and_choice_are_one_launch_where_that_was_the_fastest() -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.gpu.router import Share, share_of

    def shares(outputs: int, width: int, *rows: int, dtype: torch.dtype = torch.bfloat16) -> list[Share | None]:
        weight = torch.empty(outputs, width, dtype=dtype, device="meta")
        return [share_of(count, weight) for count in rows]

    small, large = Share(8, 8, tiled=True), Share(16, 8, tiled=True)
    assert shares(257, 2048, 8, 9, 24, 32, 48, 64) == [Share(4, 1), small, small, large, large, None]
    assert shares(128, 2048, 8, 32, 64) == [Share(2, 1), small, large]
    assert shares(128, 2880, 8, 16, 17) == [Share(2, 1), Share(8, 1), None]
    assert shares(32, 2880, 1, 64) == [Share(2, 1), Share(4, 1)]
    assert shares(256, 7168, 1, 8, 9) == [Share(2, 1), Share(4, 4), None]
    assert shares(64, 2048, 8, 9, dtype=torch.float32) == [Share(2, 1), None]


def test_no_more_rows_wait_for_scores_than_there_are_places_for() -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.router import RouterAtOnce, blanks_for

    weight = torch.empty(128, 2048, dtype=torch.bfloat16, device="meta")
    for most in (14, 64):
        found = RouterAtOnce(weight, None, Router(128, 8), None, blanks_for(128, torch.device("cpu"), most))
        assert [found.takes(rows) for rows in (1, most, most + 1)] == [True, True, False]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 2, 33, 300])
def test_a_gpu_chooses_and_sorts_as_defined(rows: int) -> None:
    """Again and again: what counts programs and rows is as it was after each time."""
    from phalanx.kernels.fp8 import Form
    from phalanx.kernels.gpu.router import Share
    from phalanx.kernels.router import MOST_ROWS
    from tests.kernels.interpreted_experts import ROUTERS, check_at_once, check_normed, check_route, check_tiles

    torch.manual_seed(rows)
    for number, router in enumerate(ROUTERS):
        check_at_once(router, min(rows, MOST_ROWS), router.experts + number % 2, torch.device("cuda"), torch.bfloat16)
    for form in Form:
        check_normed(min(rows, 8), form, Share(2, 1 + rows % 3), torch.device("cuda"))
        check_tiles(min(rows, MOST_ROWS), form, rows % 2 == 0, torch.device("cuda"))
    for router in ROUTERS:
        for joined, gated in ((False, False), (True, False), (True, True)):
            check_route(router, rows, joined, gated, torch.device("cuda"))
