"""Decode attention as it is cut and built for a GPU; `test_gpu.py`, `test_gpu_cache.py` hold it to its definition."""

from __future__ import annotations

import pytest

from phalanx.kernels.tiling import MOST_SPLITS, MOST_SPLITS_OF_FEW, is_uneven, splits_of
from tests.kernels.apart import run_apart


@pytest.mark.parametrize(
    ("rows", "kv_heads", "splits"),
    [(1, 8, 16), (1, 1, 64), (2, 2, 64), (5, 8, 8), (16, 8, 2), (32, 8, 1), (32, 2, 4), (256, 8, 1)],
)
def test_sequences_are_split_until_they_fill_a_gpu(rows: int, kv_heads: int, splits: int) -> None:
    assert splits_of(rows, kv_heads) == splits
    most = MOST_SPLITS_OF_FEW if rows * kv_heads <= 4 else MOST_SPLITS
    assert splits_of(rows, kv_heads, uneven=True) == most


@pytest.mark.parametrize(
    ("lengths", "uneven"),
    [
        ([60_000] + [500] * 31, True),
        ([500] * 5 + [60_000] + [500] * 2, True),
        ([100_000] + [1000] * 127, True),
        ([60_000], False),
        ([60_000] * 32, False),
        ([1000] * 32, False),
        ([2000, 300] * 16, False),
        ([3000] + [500] * 31, False),
        ([8000] + [1000] * 255, False),
        ([0] * 16, False),
    ],
)
def test_one_long_sequence_among_short_ones_is_split_further(lengths: list[int], uneven: bool) -> None:
    """Unless it is anyway, or the others keep the GPU busy as long, or more parts of all would cost what they save."""
    assert is_uneven(lengths, kv_heads=8) is uneven


def test_an_fp8_cache_is_not_read_byte_by_byte() -> None:
    """Compilers like to widen values only after they are where the tensor cores want them."""
    run_apart("compiled_decode", interpret=False)
