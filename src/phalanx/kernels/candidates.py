"""Which of a head's outputs are looked at again, and what is found."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CANDIDATES = 16
MOST_STRETCHES, LEAST_STRETCH = 512, 16


class Found(NamedTuple):
    """The best token of each row; and beside each other its score and the token itself, in float32 [rows, 2], for other
    ranks to see.
    """

    tokens: Tensor
    scored: Tensor


def stretch_of(width: int) -> int:
    """Columns of which one at most is looked at again: a power of two."""
    return max(LEAST_STRETCH, (1 << (width - 1).bit_length()) // MOST_STRETCHES)
