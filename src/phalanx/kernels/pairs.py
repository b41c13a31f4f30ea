"""What experts give, before it is summed up."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
