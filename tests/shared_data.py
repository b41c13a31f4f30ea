"""Measured data lie beside the repository in `shared/data`; tests that need them are skipped where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_file(name: str) -> Path:
    path = _FOLDER / name
    if not path.exists():
        pytest.skip(f"{name} is not there")
    return path
