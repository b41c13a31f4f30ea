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
    from phalanx.kernels.fp8 import Form
    from phalanx.kernels.gpu.router import Share
    from tests.kernels.interpreted_experts import ROUTERS, check_at_once, check_normed, check_route

    torch.manual_seed(rows)
    for number, router in enumerate(ROUTERS):
        check_at_once(router, min(rows, 8), router.experts + number % 2, torch.device("cuda"), torch.bfloat16)
    for form in Form:
        check_normed(min(rows, 8), form, Share(2, 1 + rows % 3), torch.device("cuda"))
    for router in ROUTERS:
        for joined, gated in ((False, False), (True, False), (True, True)):
            check_route(router, rows, joined, gated, torch.device("cuda"))
