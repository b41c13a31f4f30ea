"""How pairs of token and expert are sorted; what experts compute is held against its definition in `test_gpu.py`."""

from __future__ import annotations

import pytest

from tests.kernels.apart import run_apart

pytestmark = pytest.mark.slow


def test_the_kernels_sort_as_defined() -> None:
    """In Triton's interpreter; on a GPU `test_gpu.py` says more."""
    run_apart("interpreted_experts")
