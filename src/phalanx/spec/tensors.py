"""The tensors of a model: their shapes, how ranks share them, and where a checkpoint keeps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

Split = Literal["query", "kv", "ffn", "expert_ffn", "shared_ffn", "state", "vocab"]

Spelling = tuple[tuple[str, str], ...]
"""How some checkpoints write names: each first part, wherever it is in ours, is the second in theirs, in this order."""


class Run(NamedTuple):
    """Rows that lie among those of others: of every `stride` rows, the `width` from `offset` on."""

    width: int
    stride: int
    offset: int = 0


class Pairs(NamedTuple):
    """Rows of a head whose rotary pairs lie side by side: of every `head` rows, the `rotated` from `first` on.

    They are loaded with the first of each pair in the first half, the second in the other, as rotary embedding is
    computed here. Queries and keys are both brought to that order, so that no score changes.
    """

    head: int
    first: int
    rotated: int


@dataclass(frozen=True)
class Stored:
    """Where a checkpoint keeps a tensor that is not there under its own name and as it is.

    `stacked`: the experts of a layer lie along the first axis. `transposed`: inputs by outputs. `run`: among the rows
    of others. `plus` is added to what is stored. `packed`: only quantised ones are kept so.
    An `expert` is one of a stack.
    """

    name: str
    stacked: bool = False
    transposed: bool = False
    run: Run | None = None
    plus: float = 0.0
    packed: bool = False
    expert: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is there as it is, if under another name."""
        return not (self.stacked or self.transposed or self.run or self.plus)

    def of_expert(self, expert: int) -> Stored:
        return dataclasses.replace(
            self, name=self.name.replace("*", str(expert)), expert=expert if self.stacked else None
        )


@dataclass(frozen=True)
class Tensor:
    """One tensor of the model: its name, its whole shape, and the axis along which ranks share it.

    A `*` in the name stands for the number of an expert, and the tensor for its `copies`. `sources` are the ways in
    which checkpoints keep it, each tried in turn; none means under its own name, as it is. A `wide` one is held in
    float32 whatever the model is computed in.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None = None
    axis: int = 0
    is_linear: bool = False
    expert: bool = False
    copies: int = 1
    sources: tuple[Stored, ...] = ()
    pairs: Pairs | None = None
    wide: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def stored_name(self) -> str:
        """The first of the names under which a checkpoint may keep it."""
        return self.sources[0].name if self.sources else self.name

    def each(self) -> Iterator[Tensor]:
        """Itself, or one for every expert it stands for."""
        if "*" not in self.name:
            yield self
            return
        for expert in range(self.copies):
            name = self.name.replace("*", str(expert))
            sources = tuple(source.of_expert(expert) for source in self.sources)
            yield dataclasses.replace(self, name=name, copies=1, sources=sources)
