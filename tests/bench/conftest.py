"""Figures of tests need not be steady."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from phalanx.bench import offline


@pytest.fixture(autouse=True)
def unsettled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look for garbage before each run: among all that tests have imported it takes longer than the run."""
    monkeypatch.setattr(offline, "settled_memory", nullcontext)
