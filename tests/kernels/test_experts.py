"""How experts are chosen and pairs of token and expert sorted; what experts compute is held against its definition in
`test_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.apart import run_apart


@pytest.mark.slow
def test_the_kernels_choose_and_sort_as_defined() -> None:
    """In Triton's interpreter."""
    run_apart("interpreted_experts")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 2, 33, 300])
def test_a_gpu_chooses_and_sorts_as_defined(rows: int) -> None:
    """Again and again: what counts programs and rows is as it was after each time."""
    from tests.kernels.interpreted_experts import ROUTERS, check_route

    torch.manual_seed(rows)
    for router in ROUTERS:
        for joined, gated in ((False, False), (True, False), (True, True)):
            check_route(router, rows, joined, gated, torch.device("cuda"))
