"""A gated delta net as its definition and its kernels take it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CHUNK = 64
"""Tokens of a prompt whose corrections are solved for together."""


class DeltaWeights(NamedTuple):
    """A net with so many heads of these widths; value heads share key heads. `taps` are [channels, kernel]."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: Tensor
    decay: Tensor
    decay_bias: Tensor
    norm: Tensor
    eps: float

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        key = self.k_heads * self.k_dim
        return key, key, self.v_heads * self.v_dim


class PendingUpdates(NamedTuple):
    """What the last tokens of sequences do to their states, kept beside these: to read a state along with a few updates
    is quicker than to write it with each, and those of tokens that were guessed may be wrong.

    A state is as it was before position `since` of its sequence: [places, v_heads, v_dim], the same for all columns of
    a head. `updates` are [places, tokens, v_heads, k_dim + v_dim + 1]: a token's at its position modulo their number,
    its key, what it moves the state by there, and the logarithm of what it leaves of it. A step has up to `most` tokens
    of a sequence. Those that stand are made before the tokens of a step could take their places: some programs may be
    at them while others are done.
    """

    updates: Tensor
    since: Tensor
    most: int

    @property
    def tokens(self) -> int:
        return self.updates.shape[1]
