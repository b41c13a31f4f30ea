"""The kernel that copies states leaves what the definition leaves."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.states import States
from tests.kernels.apart import run_apart


def test_copies_are_those_of_the_definition() -> None:
    run_apart("interpreted_states")


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_all_that_is_copied_is_read_before_it_is_written(device: str, apart: bool) -> None:
    """Where places change hands among themselves, and where they do not."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    kept = [torch.randn(6, 32, 128, 128, device=device), torch.randn(6, 4, 64, device=device).to(torch.bfloat16)]
    before = [state.clone() for state in kept]
    source, target = torch.tensor([[0, 1, 2], [3, 4, 5] if apart else [1, 2, 0]], device=device)
    States(kept).copy(source, target, apart)
    for state, was in zip(kept, before, strict=True):
        assert torch.equal(state[target], was[source])
