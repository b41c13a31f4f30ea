"""Gated delta nets by the GPU's kernels are what they are defined to be."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.apart import run_apart


@pytest.mark.slow
def test_the_kernels_compute_nets_as_defined() -> None:
    """In Triton's interpreter."""
    run_apart("interpreted_delta")


CASES = [
    (torch.float32, False, 2e-4),
    (torch.bfloat16, False, 4e-2),
    (torch.bfloat16, True, 4e-2),
]


@pytest.mark.parametrize(("dtype", "quantised", "atol"), CASES)
@pytest.mark.parametrize("v_heads", [16, 32, 48])
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nets_of_real_size_on_a_gpu(dtype: torch.dtype, quantised: bool, atol: float, v_heads: int) -> None:
    """Rows alone and many at once, prompts around the borders of chunks and tiles, then both beside each other."""
    from tests.kernels.delta_nets import Nets, random_net

    torch.manual_seed(0)
    nets = Nets(random_net((16, v_heads), (128, 128), 4, dtype, "cuda"), 130)
    nets.check([(5, 0, 1000)], atol, quantised)
    nets.check([(5, 1000, 1)], atol, quantised)
    nets.alike = True
    nets.check([(6, 0, 200)], 4 * atol, quantised)
    nets.alike = False
    nets.check([(0, 0, 2), (1, 0, 63), (2, 0, 64), (3, 0, 65), (4, 0, 129)], atol, quantised)
    nets.check([(place, 0, 1) for place in range(32, 35)], atol, quantised)
    nets.check([(7, 0, 1), (nets.spare, 0, 1), (1, 63, 1), (0, 2, 4), (2, 64, 300), (5, 1001, 128)], atol, quantised)
    for rows, steps in ((32, 17), (128, 3)):
        for position in range(steps):
            nets.check([(place, position, 1) for place in range(rows)], atol, quantised)


@pytest.mark.parametrize(("dtype", "quantised", "atol"), CASES)
@pytest.mark.parametrize("v_heads", [16, 32, 48])
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rows_of_drafts_of_nets_of_real_size_on_a_gpu(
    dtype: torch.dtype, quantised: bool, atol: float, v_heads: int
) -> None:
    """One to nine rows of a sequence, which goes on behind any of them, beside prompts, and rows that fill up."""
    from tests.kernels.delta_nets import Nets, random_net

    torch.manual_seed(0)
    nets = Nets(random_net((16, v_heads), (128, 128), 4, dtype, "cuda"), 40, most=9)
    filling = (nets.spare, 0, 1)
    nets.check([(3, 0, 1), filling, filling, (2, 0, 9), (0, 0, 4), (1, 0, 10), (4, 0, 300)], atol, quantised)
    nets.check([(3, 1, 4), filling, (2, 4, 9), (0, 3, 2), (1, 10, 1), (4, 300, 6), filling], atol, quantised)
    nets.check([(3, 3, 7), (2, 13, 1), (4, 301, 65), (1, 11, 20)], atol, quantised)
    nets.check([(3, 4, 1), (1, 31, 2), (2, 14, 8), (4, 366, 1), filling, (0, 0, 5)], atol, quantised)
    for step in range(4):
        nets.check([(place, step * (1 + place % 4), 4 + (place + step) % 6) for place in range(32)], atol, quantised)
    for step in range(19):
        nets.check([(place, 3 * (1 + place % 4) + 1 + step, 1) for place in range(32)], atol, quantised)
    nets.check([(place, 3 * (1 + place % 4) + 20, 1 + place % 9) for place in range(32)], atol, quantised)
