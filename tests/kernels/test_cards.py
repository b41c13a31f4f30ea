"""Kernels build for cards that are not here: some of them, for the oldest and the newest; `make kernels` builds all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.apart import run_apart


@pytest.mark.slow
def test_kernels_build_for_ampere_and_blackwell(tmp_path: Path) -> None:
    run_apart("built_for_cards", interpret=False, TRITON_CACHE_DIR=str(tmp_path))
