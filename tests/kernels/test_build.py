"""Kernels are built ahead of their first use, many at a time, and not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.apart import run_apart


@pytest.mark.slow
def test_kernels_are_built_by_several_threads_and_none_is_launched(tmp_path: Path) -> None:
    run_apart("built_ahead", interpret=False, TRITON_CACHE_DIR=str(tmp_path))
