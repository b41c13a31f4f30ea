"""What a layer keeps of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

CacheKind = Literal["full", "sliding", "chunked", "latent", "state"]


class Reach(NamedTuple):
    """So much for each of the last `positions` (None: of all)."""

    positions: int | None
    each: float


BLOCK_SIZE = 16
"""Tokens of a block that is counted on: as many as engines start with (`engine/defaults.py`)."""


@dataclass(frozen=True)
class LayerCache:
    """What a layer keeps of a sequence, over all ranks.

    `heads * width` numbers for every `ratio` tokens, of the last `reach` tokens at most, and `state_bytes` whatever the
    length; beside these, Phalanx keeps `beside_bytes` on a GPU. A latent has one head, which every rank keeps.
    `goes_back`: a sequence may go on before the last tokens that what it keeps whatever its length has seen.
    """

    kind: CacheKind
    heads: int = 0
    width: int = 0
    reach: int | None = None
    state_bytes: int = 0
    beside_bytes: int = 0
    ratio: int = 1
    goes_back: bool = False

    def block_numbers(self, block_size: int) -> int:
        """Numbers that a block of so many tokens has room for: where `ratio` is larger, those of one entry."""
        return self.heads * self.width * -(-block_size // self.ratio)

    @property
    def numbers_per_token(self) -> float:
        return self.block_numbers(BLOCK_SIZE) / BLOCK_SIZE

    def bytes(self, tokens: int, element_bytes: float) -> int:
        kept = tokens if self.reach is None else min(tokens, self.reach)
        return int(self.numbers_per_token * kept * element_bytes) + self.state_bytes


class StatePlaces(NamedTuple):
    """The places of states behind those of the sequences and the one for rows that only fill up a batch.

    Those that belong to prefixes, and those for states as they were before drafts, where states cannot go back, as many
    of each as sequences may run.
    """

    snapshots: range
    twins: range

    @classmethod
    def of(cls, sequences: int, prefix_caching: bool, with_twins: bool) -> StatePlaces:
        end = sequences + 1 + (sequences if prefix_caching else 0)
        return cls(range(sequences + 1, end), range(end, end + (sequences if with_twins else 0)))

    @property
    def total(self) -> int:
        return self.twins.stop


MOST_TOKEN_BLOCKS = 2**20


class WindowGroup(NamedTuple):
    """Layers that look back on `reach` positions and share a table of blocks."""

    reach: int
    layers: tuple[int, ...]


def window_groups(caches: Sequence[LayerCache], max_positions: int) -> tuple[WindowGroup, ...]:
    """Layers whose blocks can be given up behind a window, in groups of as many as keep everything.

    So a block is of one size for all, and what one group gives up another one can take. Layers that keep something else
    than those do, or are too few to fill half a group, keep all blocks like the others. Where no layer keeps
    everything, all are one group, with the longest of their windows.
    """
    whole = [cache for cache in caches if cache.reach is None and cache.width]
    if not whole:
        reach = max((cache.reach for cache in caches if cache.reach is not None), default=max_positions)
        windowed = tuple(number for number, cache in enumerate(caches) if cache.width)
        return (WindowGroup(reach, windowed),) if reach < max_positions else ()
    groups: list[WindowGroup] = []
    for reach in sorted({cache.reach for cache in caches if cache.reach is not None and cache.reach < max_positions}):
        layers = [
            number
            for number, cache in enumerate(caches)
            if cache.reach == reach and all((cache.heads, cache.width) == (full.heads, full.width) for full in whole)
        ]
        if 2 * len(layers) >= len(whole):
            parts = range(0, len(layers), len(whole))
            groups += [WindowGroup(reach, tuple(layers[first : first + len(whole)])) for first in parts]
    return tuple(groups)


def token_blocks(sequences: int, longest: int, block_size: int) -> int:
    """Blocks for the token ids of so many sequences, where nothing else is kept of them as a whole."""
    each = -(-longest // block_size)
    return max(each, min(sequences * each, MOST_TOKEN_BLOCKS))
