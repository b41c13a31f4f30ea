"""EngineHabits: what an engine's program does around its kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineHabits:
    """`overlaps`: the host prepares a step while the GPU takes the last. `is_eager`: it launches a prompt's kernels one
    by one, where others run compiled pieces. `is_native`: the host is a program in C++, whose time does not show.
    `sends_rows`: one rank prepares every step, and sends it to the others. `splits_contexts`: many blocks of threads
    read a long context of a decode; else one reads all that a head has of a sequence.
    """

    overlaps: bool = False
    is_eager: bool = False
    is_native: bool = False
    sends_rows: bool = False
    splits_contexts: bool = True


PLAIN_HABITS = EngineHabits()
