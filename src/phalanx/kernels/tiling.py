"""How the rows of a step are cut for attention: sequences of one token, tiles of prompts, parts of long sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PROMPT_TILE = 128
"""Rows of one prompt that a GPU takes at once."""

SPLIT_TARGET = 264
"""Programs that fill a large GPU: decode attention is split over the sequence until there are about this many."""

MOST_SPLITS, MOST_SPLITS_OF_FEW = 16, 64
FEW_HEADS = 4
"""A sequence or two with so few KV heads as a rank has of many models: in more parts even where they are long, since
nothing else fills the GPU.
"""

READERS = 147
"""Programs that, each at its own speed, read as fast as memory does. From an H200, as is the next one."""

PART_TOKENS = 0.75
"""What a further program costs all of them, in tokens that one reads meanwhile."""


def splits_of(rows: int, kv_heads: int, uneven: bool = False) -> int:
    """The parts of every sequence, each a program for every KV head."""
    programs = rows * kv_heads
    most = MOST_SPLITS_OF_FEW if programs <= FEW_HEADS else MOST_SPLITS
    wanted = most if uneven else max(1, min(most, SPLIT_TARGET // programs))
    return int(1 << (wanted - 1).bit_length())


def is_uneven(lengths: Sequence[int], kv_heads: int) -> bool:
    """Whether the GPU would wait for the longest of these sequences, and longer than further parts of all take it."""
    rows = len(lengths)
    longest_part = max(lengths) / splits_of(rows, kv_heads)
    together = kv_heads * (sum(lengths) / READERS + rows * MOST_SPLITS * PART_TOKENS)
    return longest_part > 2 * together


@dataclass(frozen=True)
class DecodeRows:
    """Rows that are the last token of their sequence, as far as they see: they come first and run as one product.
    Several of one sequence lie together. Rows of the last slot fill up, and are each on their own.

    `tables` are the blocks of all slots, whatever their number; only `blocks` of each are looked at, where that is
    known. `uneven` says that some are much longer than the others, `apart` that each is the only one of its sequence,
    which is known where they are planned.
    """

    tables: Tensor
    slots: Tensor
    positions: Tensor
    uneven: bool = False
    blocks: int | None = None
    apart: bool = False

    @cached_property
    def block_table(self) -> Tensor:
        """The blocks of each row, gathered."""
        return self.tables[self.slots, : self.blocks].long()

    @cached_property
    def sequences(self) -> tuple[Tensor, Tensor]:
        """The first row of each sequence, and how many it has."""
        slots = self.slots
        begins = torch.ones_like(slots, dtype=torch.bool)
        begins[1:] = (slots[1:] != slots[:-1]) | (slots[1:] == len(self.tables) - 1)
        firsts = begins.nonzero()[:, 0]
        return firsts, torch.diff(firsts, append=firsts.new_tensor([len(slots)]))


@dataclass(frozen=True)
class PrefillTiles:
    """Sequences that compute several tokens, for a GPU: cut into tiles of rows.

    A tile is its row of `tables`, its first row, its rows, its first position, and where this step began its sequence.
    `resumed` says whether any sequence has tokens from before this step.
    """

    tables: Tensor
    tiles: Tensor
    resumed: bool


def tile_prompt(sequence: int, first: int, count: int, start: int) -> list[tuple[int, int, int, int, int]]:
    """The tiles of one sequence, the longest look-back first."""
    offsets = reversed(range(0, count, PROMPT_TILE))
    return [(sequence, first + at, min(PROMPT_TILE, count - at), start + at, start) for at in offsets]
