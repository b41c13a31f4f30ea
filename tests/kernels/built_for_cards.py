"""Builds some kernels for the oldest and the newest cards, which needs no GPU. Run by `test_cards.py`."""

from __future__ import annotations

from benchmarks.kernels import build_for

if __name__ == "__main__":
    for capability in (80, 120):
        built, wrong = build_for(capability, ["rows"])
        assert built
        assert not wrong, wrong
