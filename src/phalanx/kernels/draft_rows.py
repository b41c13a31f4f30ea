"""What drafts are made from and for, as tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sequences(NamedTuple):
    """Those that yield tokens: slots, positions that have room, the first token of each among all, how many."""

    slots: Tensor
    rooms: Tensor
    first: Tensor
    samples: Tensor


class StepRows(NamedTuple):
    """Of a step: slots, positions, tokens, and the number of the token that each yields, or -1; and the row of each of
    these tokens.
    """

    slots: Tensor
    positions: Tensor
    tokens: Tensor
    yields: Tensor
    wanted: Tensor


class Guess(NamedTuple):
    """Where a guess behind each sequence is computed: slots, positions and places in the cache, [groups, sequences].
    `after` is the position of the token that is guessed.
    """

    slots: Tensor
    positions: Tensor
    places: Tensor
    after: Tensor


class Standing(NamedTuple):
    """Of a step: the token behind each row; of each sequence the last row that stands, the token it yields, its
    position, and how many drafts there is room for; and where the first of them is guessed.
    """

    following: Tensor
    last: Tensor
    tokens: Tensor
    positions: Tensor
    counts: Tensor
    guess: Guess


class Cache(NamedTuple):
    """Tokens by place, and each group's tables of places, of which the last slot is spare."""

    kept: Tensor
    tables: Tensor
    block_size: int
