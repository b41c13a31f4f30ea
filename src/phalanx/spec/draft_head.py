"""A head that drafts: one layer more, which guesses the token behind the next one (multi-token prediction)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.spec.hyper import Hyper
from phalanx.spec.layer import Layer
from phalanx.spec.tensors import Tensor

MOST_DRAFTS = 8
"""Of a request in one step."""


class HeadNames(NamedTuple):
    """Of the norms of what is embedded and of what the model made, of what brings both to one width, and of the last
    norm. Two `joins` have a half each, one has both, what is embedded first.
    """

    embedded_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    joins: tuple[str, ...] = ("eh_proj",)
    norm: str = "shared_head.norm"


DEEPSEEK_NAMES = HeadNames()


@dataclass(frozen=True)
class DraftHead:
    """Takes what the model made of a token, and the token behind it. Embedding and head are the model's own.

    `prefix` is what the names of its tensors begin with, `layer_prefix` those of its layer.
    """

    layer: Layer
    prefix: str
    layer_prefix: str
    names: HeadNames = DEEPSEEK_NAMES

    def tensors(self, hidden: int, hyper: Hyper | None) -> Iterator[Tensor]:
        """What joins both inputs is whole on every rank, the layer is shared like any other."""
        norms = self.layer.norms
        for name in (self.names.embedded_norm, self.names.hidden_norm):
            yield norms.tensor(f"{self.prefix}{name}.weight", hidden)
        columns = 2 * hidden // len(self.names.joins)
        for name in self.names.joins:
            yield Tensor(f"{self.prefix}{name}.weight", (hidden, columns), is_linear=True)
        yield from self.layer.tensors(self.layer_prefix, hidden)
        if hyper is not None:
            yield from hyper.around_parts(self.layer_prefix, hidden)
            yield from hyper.at_the_end(self.prefix, hidden)
        yield norms.tensor(f"{self.prefix}{self.names.norm}.weight", hidden)
