"""Hyper-connections: several residual streams, mixed anew around every part of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.spec.tensors import Tensor


@dataclass(frozen=True)
class Hyper:
    """From all `streams` of a token come the weights of what a part takes, of what it gives to each of them, and of how
    they pass to each other. The last are brought near rows and columns that sum to 1 in so many `rounds`.
    """

    streams: int
    rounds: int
    eps: float

    def around_parts(self, prefix: str, hidden: int) -> Iterator[Tensor]:
        """Of one layer."""
        for part in ("attn_hc", "ffn_hc"):
            rows = (2 + self.streams) * self.streams
            yield Tensor(f"{prefix}{part}.fn", (rows, self.streams * hidden), wide=True)
            yield Tensor(f"{prefix}{part}.base", (rows,), wide=True)
            yield Tensor(f"{prefix}{part}.scale", (3,), wide=True)

    def at_the_end(self, prefix: str, hidden: int) -> Iterator[Tensor]:
        """Where the streams become one again."""
        path = f"{prefix}hc_head.hc_"
        yield Tensor(f"{path}fn", (self.streams, self.streams * hidden), wide=True)
        yield Tensor(f"{path}base", (self.streams,), wide=True)
        yield Tensor(f"{path}scale", (1,), wide=True)
