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
