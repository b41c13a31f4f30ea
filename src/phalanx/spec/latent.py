"""Multi-head latent attention: what it holds, keeps and costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.spec.cache import LayerCache, Reach
from phalanx.spec.rope import Rope
from phalanx.spec.tensors import Pairs, Tensor


@dataclass(frozen=True)
class Indexer:
    """Chooses the `top_k` tokens that sparse attention looks at; keeps a key of `head_dim` numbers a token.

    A layer without an indexer of its `own` takes the choice of the one before it that has one. Its keys and queries
    turn by the model's rope in their first dimensions; `interleaved`: the checkpoint's pairs lie side by side.
    """

    heads: int
    head_dim: int
    top_k: int
    own: bool = True
    interleaved: bool = False


@dataclass(frozen=True)
class Mla:
    """Of a token, one latent of `kv_rank` numbers and a key of `rope_dim` numbers are kept, for all heads."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: Rope
    scale: float
    interleaved: bool = True
    indexer: Indexer | None = None
    module: str = "self_attn"

    latent = True
    head_group = 1
    kv_heads = 1
    state_heads = 0
    state_value_heads = 0

    def __post_init__(self) -> None:
        for head_dim in (self.rope_dim, *((self.indexer.head_dim,) if self.indexer else ())):
            self.rope.check_within(head_dim)

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def cache(self) -> LayerCache:
        index = self.indexer.head_dim if self.indexer and self.indexer.own else 0
        return LayerCache("latent", 1, self.width + index)

    @property
    def reads(self) -> tuple[Reach, ...]:
        return (Reach(self.indexer.top_k if self.indexer else None, self.width),)

    @property
    def pairs(self) -> tuple[Reach, ...]:
        return (Reach(None, self.head_dim + self.v_dim),)

    def tensors(self, prefix: str, hidden: int) -> Iterator[Tensor]:
        """What makes the latents is whole on every rank; what the heads make of them is dealt by heads."""
        path = f"{prefix}{self.module}."
        query, pairs = (self.heads * self.head_dim, self.q_rank or hidden), self._pairs(self.head_dim, self.nope_dim)
        if self.q_rank is None:
            yield Tensor(path + "q_proj.weight", query, "query", is_linear=True, pairs=pairs)
        else:
            yield Tensor(path + "q_a_proj.weight", (self.q_rank, hidden), is_linear=True)
            yield Tensor(path + "q_a_layernorm.weight", (self.q_rank,))
            yield Tensor(path + "q_b_proj.weight", query, "query", is_linear=True, pairs=pairs)
        latent_pairs = self._pairs(self.width, self.kv_rank)
        yield Tensor(path + "kv_a_proj_with_mqa.weight", (self.width, hidden), is_linear=True, pairs=latent_pairs)
        yield Tensor(path + "kv_a_layernorm.weight", (self.kv_rank,))
        rows = self.heads * (self.nope_dim + self.v_dim)
        yield Tensor(path + "kv_b_proj.weight", (rows, self.kv_rank), "query", is_linear=True)
        yield Tensor(path + "o_proj.weight", (hidden, self.heads * self.v_dim), "query", axis=1, is_linear=True)
        if self.indexer is not None and self.indexer.own:
            yield from self._indexer(self.indexer, f"{path}indexer.", hidden)

    def _pairs(self, head: int, first: int) -> Pairs | None:
        return Pairs(head, first, self.rope_dim) if self.interleaved else None

    def _indexer(self, indexer: Indexer, path: str, hidden: int) -> Iterator[Tensor]:
        rows, width = indexer.heads * indexer.head_dim, indexer.head_dim
        pairs = Pairs(width, 0, self.rope_dim) if indexer.interleaved else None
        yield Tensor(path + "wq_b.weight", (rows, self.q_rank or hidden), is_linear=True, pairs=pairs)
        yield Tensor(path + "wk.weight", (width, hidden), is_linear=True, pairs=pairs)
        yield Tensor(path + "k_norm.weight", (width,), pairs=pairs)
        yield Tensor(path + "k_norm.bias", (width,), pairs=pairs)
        yield Tensor(path + "weights_proj.weight", (indexer.heads, hidden))
