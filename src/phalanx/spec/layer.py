"""A layer: a mixer, which lets a token see those before it, and an FFN, each with norms around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from phalanx.spec.cache import LayerCache, Reach
from phalanx.spec.ffn import Dense, Moe
from phalanx.spec.rope import Rope
from phalanx.spec.tensors import Stored, Tensor

Ffn = Dense | Moe


class Mixer(Protocol):
    """What all readers of a model ask of a mixer. Sizes are over all ranks."""

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def latent(self) -> bool:
        """Whether every rank keeps what all heads share."""
        ...

    @property
    def state_heads(self) -> int:
        """Heads of a recurrent state to deal."""
        ...

    @property
    def state_value_heads(self) -> int: ...

    @property
    def rope(self) -> Rope | None: ...

    @property
    def cache(self) -> LayerCache: ...

    @property
    def head_group(self) -> int:
        """Query heads that no rank may share out."""
        ...

    @property
    def reads(self) -> tuple[Reach, ...]:
        """Numbers that a decode reads of each position."""
        ...

    @property
    def pairs(self) -> tuple[Reach, ...]:
        """Multiply-adds of a head for a pair of positions of a prompt."""
        ...

    def tensors(self, prefix: str, hidden: int) -> Iterator[Tensor]: ...


class Norms(NamedTuple):
    """The norms of a layer by their names: before and after its mixer and its FFN; None where there is none.

    `plus` is what checkpoints leave out of their weights: 1 where those are centred on zero. `wide` ones are float32.
    """

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_ffn: str | None = "post_attention_layernorm"
    after_ffn: str | None = None
    plus: float = 0.0
    wide: bool = False

    def tensor(self, name: str, hidden: int) -> Tensor:
        sources = (Stored(name, plus=self.plus),) if self.plus else ()
        return Tensor(name, (hidden,), sources=sources, wide=self.wide or bool(self.plus))


@dataclass(frozen=True)
class Layer:
    mixer: Mixer
    ffn: Ffn
    norms: Norms = field(default=Norms(), repr=False)

    def tensors(self, prefix: str, hidden: int) -> Iterator[Tensor]:
        """In the order the forward pass meets them."""
        norms = self.norms
        around = ((norms.before_mixer, self.mixer, norms.after_mixer), (norms.before_ffn, self.ffn, norms.after_ffn))
        for before, part, after in around:
            if before:
                yield norms.tensor(f"{prefix}{before}.weight", hidden)
            yield from part.tensors(prefix, hidden)
            if after:
                yield norms.tensor(f"{prefix}{after}.weight", hidden)
