"""Rotary position embedding: how fast each pair of dimensions turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_OF_WAVES = ("original_max_positions", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
"""What says which waves are long."""
_MOST = 2.0**53


@dataclass(frozen=True)
class Rope:
    """`kind` names how long contexts are reached.

    Checkpoints keep the two numbers of a pair half the rotated dimensions apart, or side by side (see `Pairs`).
    `divisors` are longrope's, one for each frequency.
    """

    theta: float
    rotary_dim: int
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        told = [(name, getattr(self, name)) for name in ("theta", "factor", "attention_factor")]
        if self.kind in ("llama3", "yarn"):
            told += [(name, getattr(self, name)) for name in _OF_WAVES]
        for name, value in (*told, *(("a divisor", divisor) for divisor in self.divisors)):
            if not 0 < value < _MOST:
                raise ValueError(f"{name} of rotary positions is {value}, which is no number above 0 and below 2^53")
        if self.kind == "yarn" and self.theta == 1:
            raise ValueError("theta of rotary positions is 1: all pairs of dimensions turn alike")

    def check_within(self, head_dim: int) -> None:
        """Numbers are turned in pairs: of 13, 14 are."""
        turned = self.rotary_dim + self.rotary_dim % 2
        if not 0 < turned <= head_dim:
            raise ValueError(f"rotary positions turn {turned} numbers of a head of {head_dim}")
