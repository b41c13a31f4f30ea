"""Figures of tests need not be steady."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _unsteady(unsteady_figures: None) -> None: ...
