"""How many steps ahead a kernel loads: as many as the card's shared memory has room for."""

from __future__ import annotations

from functools import cache

from triton.language.target_info import current_target

ROOMY = {80, 87, 90, 100, 103}
"""Compute capabilities with 160 KiB or more for a program; the others, cards for desktops among them, have 99."""
MOST_IN_LITTLE = 2


@cache
def is_roomy() -> bool:
    target = current_target()
    return target is None or target.arch in ROOMY


@cache
def is_hopper() -> bool:
    """With 227 KiB, which its tensor cores read in place."""
    target = current_target()
    return target is None or target.arch == 90


def stages_here(stages: int) -> int:
    """Stages of a pipeline that was measured on a card with much shared memory."""
    return stages if is_roomy() else min(stages, MOST_IN_LITTLE)
