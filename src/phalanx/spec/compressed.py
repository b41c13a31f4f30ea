"""Attention to a window, and to entries that each stand for many tokens: what it holds, keeps and costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.spec.cache import LayerCache, Reach
from phalanx.spec.latent import Indexer
from phalanx.spec.rope import Rope
from phalanx.spec.tensors import Tensor


@dataclass(frozen=True)
class Compressed:
    """A token is one vector of `head_dim` numbers for all heads, their key and their value in one.

    It looks at the last `window` of them and, with a `ratio`, at entries that stand for `ratio` tokens each. With
    an `indexer` it looks at those of them that this chooses, and an entry is made from the tokens before its own too.
    Heads leave by `groups`, each of which is brought to `group_rank` numbers on its own. A ring has `slack` more than
    the window, which drafts that may be wrong take.
    """

    heads: int
    head_dim: int
    q_rank: int
    rope: Rope
    scale: float
    window: int
    groups: int
    group_rank: int
    ratio: int = 0
    slack: int = 0
    indexer: Indexer | None = None
    module: str = "self_attn"

    latent = True
    kv_heads = 1
    state_heads = 0
    state_value_heads = 0

    def __post_init__(self) -> None:
        for head_dim in (self.head_dim, *((self.indexer.head_dim,) if self.indexer else ())):
            self.rope.check_within(head_dim)

    @property
    def head_group(self) -> int:
        return self.heads // self.groups

    @property
    def ring(self) -> int:
        """The last vectors that are kept."""
        return self.window + self.slack

    @property
    def span(self) -> int:
        """Tokens that an entry is made from."""
        return 2 * self.ratio if self.indexer else self.ratio

    @property
    def entry(self) -> int:
        """Numbers kept of every `ratio` tokens: an entry, and the indexer's key of it."""
        if not self.ratio:
            return 0
        return self.head_dim + (self.indexer.head_dim if self.indexer else 0)

    @property
    def state_bytes(self) -> int:
        """In bf16: the last vectors, and values and gates of those tokens that the next entry is made from."""
        inputs = 2 * self.entry * self.span // self.ratio if self.ratio else 0
        return 2 * (self.ring * self.head_dim + self.span * inputs)

    @property
    def cache(self) -> LayerCache:
        if not self.ratio:
            return LayerCache("sliding", reach=self.window, state_bytes=self.state_bytes)
        return LayerCache("latent", 1, self.entry, state_bytes=self.state_bytes, ratio=self.ratio)

    @property
    def reads(self) -> tuple[Reach, ...]:
        near = Reach(self.window, self.head_dim)
        if self.indexer is None:
            return (near, Reach(None, self.head_dim / self.ratio)) if self.ratio else (near,)
        chosen = Reach(self.indexer.top_k * self.ratio, self.head_dim / self.ratio)
        return near, chosen, Reach(None, self.indexer.head_dim / self.ratio)

    @property
    def pairs(self) -> tuple[Reach, ...]:
        seen = tuple(Reach(positions, 2 * each) for positions, each in self.reads)
        if self.indexer is None:
            return seen
        index = self.indexer.heads * self.indexer.head_dim / self.heads
        return *seen[:-1], Reach(None, index / self.ratio)

    def tensors(self, prefix: str, hidden: int) -> Iterator[Tensor]:
        """What makes keys is whole on every rank; heads are dealt by whole groups."""
        path, width = f"{prefix}{self.module}.", self.heads * self.head_dim
        yield Tensor(path + "q_a_proj.weight", (self.q_rank, hidden), is_linear=True)
        yield Tensor(path + "q_a_norm.weight", (self.q_rank,), wide=True)
        yield Tensor(path + "q_b_proj.weight", (width, self.q_rank), "query", is_linear=True)
        yield Tensor(path + "kv_proj.weight", (self.head_dim, hidden), is_linear=True)
        yield Tensor(path + "kv_norm.weight", (self.head_dim,), wide=True)
        yield Tensor(path + "sinks", (self.heads,), "query", wide=True)
        narrow = self.groups * self.group_rank
        yield Tensor(path + "o_a_proj.weight", (narrow, width // self.groups), "query", is_linear=True)
        yield Tensor(path + "o_b_proj.weight", (hidden, narrow), "query", axis=1, is_linear=True)
        if self.ratio:
            yield from self._compressor(f"{path}compressor.", self.head_dim, hidden)
        if self.indexer is not None:
            index = f"{path}compressor.indexer."
            yield from self._compressor(index, self.indexer.head_dim, hidden)
            rows = self.indexer.heads * self.indexer.head_dim
            yield Tensor(index + "q_b_proj.weight", (rows, self.q_rank), is_linear=True)
            yield Tensor(index + "scorer.weights_proj.weight", (self.indexer.heads, hidden))

    def _compressor(self, path: str, width: int, hidden: int) -> Iterator[Tensor]:
        columns = width * (self.span // self.ratio)
        yield Tensor(path + "kv_proj.weight", (columns, hidden))
        yield Tensor(path + "gate_proj.weight", (columns, hidden))
        yield Tensor(path + "position_bias", (self.ratio, columns), wide=True)
        yield Tensor(path + "kv_norm.weight", (width,), wide=True)
