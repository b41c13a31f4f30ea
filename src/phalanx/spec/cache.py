"""What a layer keeps of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

CacheKind = Literal["full", "sliding", "chunked", "latent", "state"]


class Reach(NamedTuple):
    """So much for each of the last `positions` (None: of all)."""

    positions: int | None
    each: float


@dataclass(frozen=True)
class LayerCache:
    """What a layer keeps of a sequence, over all ranks.

    `heads * width` numbers a token, of the last `reach` tokens at most, and `state_bytes` whatever the length. A latent
    has one head, which every rank keeps.
    """

    kind: CacheKind
    heads: int = 0
    width: int = 0
    reach: int | None = None
    state_bytes: int = 0

    def bytes(self, tokens: int, element_bytes: float) -> int:
        kept = tokens if self.reach is None else min(tokens, self.reach)
        return int(self.heads * self.width * kept * element_bytes) + self.state_bytes
