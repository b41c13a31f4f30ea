"""Which of a head's outputs are looked at again, and what is found."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CANDIDATES = 16
COMBS = 512
"""Columns that are so far apart make up a comb, of which one is a candidate. Neighbours are in different ones: tokens
that are alike, or frequent, have numbers close to each other."""


class BestTokens(NamedTuple):
    """The best token of each row; and beside each other its score and the token itself, in float32 [rows, 2], for other
    ranks to see.
    """

    tokens: Tensor
    scored: Tensor
