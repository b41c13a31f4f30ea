"""Pairs of token and expert: sorted by expert, and what experts give, before it is summed up."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ByExpert(NamedTuple):
    """`order` lists pair numbers by expert, padded with the number of pairs to whole tiles of rows.

    `owner` says whose a tile is, -1 being nobody's. Both have room for the worst case, so that nobody need be asked.
    """

    order: Tensor
    owner: Tensor


class Unsummed(NamedTuple):
    """[tokens * top, hidden], a row for each pair of token and expert: a token is the sum of its `top` rows."""

    rows: Tensor
    top: int


def summed_torch(given: Unsummed) -> Tensor:
    """The definition of their sum: in float32, in the order of the pairs, rounded once."""
    rows, top = given
    of_token = rows.unflatten(0, (-1, top)).float()
    total = of_token[:, 0].clone()
    for pair in range(1, top):
        total += of_token[:, pair]
    return total.to(rows.dtype)
