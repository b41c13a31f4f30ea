"""Layout: which part of every tensor belongs to which rank. Plain arithmetic for loader, layers and planner alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm

from phalanx.errors import LayoutError
from phalanx.spec.cache import CacheKind, LayerCache
from phalanx.spec.formats import FORMATS, NumberFormat
from phalanx.spec.model import ModelSpec
from phalanx.spec.tensors import Split, Tensor

ALIGNED_UNITS = (64, 32, 16)

NARROWED_FROM = 64 * 2**20
"""Bytes of a head that drafts had better not read whole: an H200 reads so many in 16 us."""
FOUR_BITS_FROM = 512 * 2**20
"""Bytes of a head from which on four bits and a second look are faster than FP8, whose look is one alone."""
HOPPER, MULTIPLIES_FP8 = 9, (8, 9)
FOUR_BIT_HEAD = NumberFormat("int4", 4, (1, 128), 3)
"""With zero points of a byte. On other GPUs than Hoppers, products with four bits are no faster than with FP8."""


def deal(units: int, ranks: int) -> list[range]:
    """Whole units to ranks, in order and as evenly as they go: the first ranks get one more when it does not divide."""
    share, extra = divmod(units, ranks)
    starts = [rank * share + min(rank, extra) for rank in range(ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def deal_elements(elements: int, unit: int, ranks: int) -> list[range]:
    """Elements dealt in units; where the last unit is short, the rank that owns it owns fewer elements."""
    shares = deal(-(-elements // unit), ranks)
    return [range(min(share.start * unit, elements), min(share.stop * unit, elements)) for share in shares]


def aligned_unit(elements: int, ranks: int) -> int:
    """The unit of a dimension without blocks: among aligned ones with the smallest top share, the largest."""
    candidates = [unit for unit in ALIGNED_UNITS if elements % unit == 0] or [1]
    return min(candidates, key=lambda unit: (-(-elements // unit // ranks) * unit, -unit))


@dataclass(frozen=True)
class Shard:
    """What one rank owns: ranges of heads, of FFN columns, of vocabulary rows and of a delta net's key heads."""

    rank: int
    query_heads: range
    kv_heads: range
    ffn: range
    expert_ffn: range
    vocab: range
    shared_ffn: range
    state_heads: range


class Layout:
    """Deals a model to `tp` ranks in whole units: KV-head groups, blocks that share a scale, aligned column groups.

    Shares may differ by one unit. Where there are more ranks than KV heads, a KV head is held by several ranks, which
    share its query heads. A rank may own no FFN block (6 blocks over 8 ranks), but every rank owns a query head.
    """

    def __init__(self, spec: ModelSpec, tp: int, inner_units: int | None = None) -> None:
        """With `inner_units` the columns of FFNs are dealt in so many units (see `invariant.py`)."""
        self.spec = spec
        self.tp = tp
        self.inner_units = inner_units
        self._check()
        heads = self._deal_heads()
        ffn = self._deal_columns(spec.intermediate)
        expert_ffn = self._deal_columns(spec.moe.intermediate if spec.moe else 0, expert=True)
        shared_ffn = self._deal_columns(spec.moe.shared if spec.moe else 0)
        vocab = deal_elements(spec.vocab, self.column_unit(spec.vocab, blocks=False), tp)
        state_heads = deal(spec.state_heads, tp)
        self.shards = tuple(
            Shard(rank, *heads[rank], ffn[rank], expert_ffn[rank], vocab[rank], shared_ffn[rank], state_heads[rank])
            for rank in range(tp)
        )

    def block(self, expert: bool = False) -> int | None:
        """Columns that share a scale and stay together; None where a row has one scale or none."""
        quantization = self.spec.quantization
        return quantization.scheme_for(expert).format.unit if quantization else None

    def column_unit(self, columns: int, blocks: bool = True, expert: bool = False) -> int:
        """Columns dealt together: a block where the tensor has blocks, else an aligned group."""
        return (self.block(expert) if blocks else None) or aligned_unit(columns, self.tp)

    def _deal_columns(self, columns: int, expert: bool = False) -> list[range]:
        unit = columns // self.inner_units if self.inner_units else self.column_unit(columns, expert=expert)
        return deal_elements(columns, max(unit, 1), self.tp)

    @cached_property
    def _head_block(self) -> int | None:
        """Columns that stay together in the matrices of heads."""
        of_heads = (tensor for tensor, _ in self.spec.tensor_kinds if tensor.split in ("query", "kv"))
        cut = (tensor for tensor in of_heads if tensor.axis == 1 or self._blocks_of_rows)
        return self.block() if any(map(self.spec.is_quantised, cut)) else None

    @cached_property
    def head_unit(self) -> int:
        """Heads dealt together: as the model groups them, and as fill whole blocks where their matrices have any."""
        group = self.spec.head_group
        return group if self._head_block is None else lcm(group, self._filling(self.spec.head_dim))

    def _filling(self, width: int) -> int:
        """How many of this width fill whole blocks."""
        assert self._head_block is not None
        return self._head_block // gcd(self._head_block, width)

    @property
    def _blocks_of_rows(self) -> bool:
        """Whether rows share scales too."""
        quantization = self.spec.quantization
        tile = quantization.scheme_for(expert=False).format.tile if quantization else None
        return tile is not None and tile[0] > 1

    @property
    def kv_unit(self) -> int:
        """KV heads dealt together; a latent is not dealt, every rank keeps it.

        Where only columns share scales, it is the columns of a KV head's query heads that have to fill blocks.
        """
        if self.spec.latent:
            return 1
        if self._head_block is None or self._blocks_of_rows:
            return self.head_unit
        return self._filling(self.spec.head_dim * self.spec.query_group)

    @property
    def query_unit(self) -> int:
        """Query heads of one KV head dealt together to the ranks that share it."""
        if self.spec.latent:
            return self.head_unit
        return 1 if self._head_block is None or self._blocks_of_rows else self._filling(self.spec.head_dim)

    def _check(self) -> None:
        if self.tp < 1:
            raise LayoutError("bad_tp", f"TP is {self.tp}.", "It must be at least 1.")
        most, what = self.spec.heads, f"{self.spec.heads} query heads"
        if self.spec.latent and self.head_unit > 1:
            most = -(-self.spec.heads // self.head_unit)
            what = f"{most} groups of {self.head_unit} query heads"
        elif self.query_unit > 1 and self.kv_unit == 1:
            most = self.spec.kv_heads * -(-self.spec.query_group // self.query_unit)
            what = f"{most} groups of {self.query_unit} query heads, which fill a block of {self._head_block}"
        elif self.kv_unit > 1:
            most = -(-self.spec.kv_heads // self.kv_unit)
            what = (
                f"{most} groups of {self.kv_unit} KV heads (head_dim {self.spec.head_dim} "
                f"fills a block of {self._head_block} only together)"
            )
        if 0 < self.spec.state_heads < most:
            most, what = self.spec.state_heads, f"{self.spec.state_heads} key heads of delta nets"
        if self.tp > most:
            raise LayoutError("tp_too_large", f"TP={self.tp}, but the model has {what} to deal.", f"Use TP <= {most}.")

    def _deal_heads(self) -> list[tuple[range, range]]:
        group, kv_heads = self.spec.query_group, self.spec.kv_heads
        if self.tp <= kv_heads:
            shares = deal_elements(kv_heads, self.kv_unit, self.tp)
            return [(range(kv.start * group, kv.stop * group), kv) for kv in shares]
        dealt = []
        for head, holders in enumerate(deal(self.tp, kv_heads)):
            for query in deal_elements(group, self.query_unit, len(holders)):
                query_heads = range(head * group + query.start, head * group + query.stop)
                dealt.append((query_heads, range(head, head + 1)))
        return dealt

    def owned(self, split: Split, rank: int) -> range:
        """Elements of a dimension of this kind that the rank owns."""
        shard, head_dim = self.shards[rank], self.spec.head_dim
        if split in ("query", "kv"):
            heads = shard.query_heads if split == "query" else shard.kv_heads
            return range(heads.start * head_dim, heads.stop * head_dim)
        dealt = {"ffn": shard.ffn, "expert_ffn": shard.expert_ffn, "shared_ffn": shard.shared_ffn, "vocab": shard.vocab}
        return dealt[split]

    def _owned_of(self, tensor: Tensor, split: Split, rank: int) -> range:
        """Elements along the tensor's axis: of heads, as many for each head as this tensor has."""
        shard, size = self.shards[rank], tensor.shape[tensor.axis]
        dealt = {
            "query": (shard.query_heads, self.spec.heads),
            "kv": (shard.kv_heads, self.spec.kv_heads),
            "state": (shard.state_heads, self.spec.state_heads),
        }
        if split not in dealt:
            return self.owned(split, rank)
        heads, total = dealt[split]
        return range(heads.start * size // total, heads.stop * size // total)

    def slices(self, tensor: Tensor, rank: int) -> tuple[slice, ...]:
        """The part of a checkpoint tensor that the rank reads."""
        parts = [slice(0, size) for size in tensor.shape]
        if tensor.split is not None:
            owned = self._owned_of(tensor, tensor.split, rank)
            parts[tensor.axis] = slice(owned.start, owned.stop)
        return tuple(parts)

    def shape(self, tensor: Tensor, rank: int) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.slices(tensor, rank))

    def weight_bytes(self, rank: int, number_format: str) -> int:
        """Bytes of the weights this rank holds."""
        return sum(
            self.spec.tensor_bytes(tensor, self.shape(tensor, rank), number_format) * count
            for tensor, count in self.spec.tensor_kinds
        )

    def narrow_head(self, capability: str) -> NumberFormat | None:
        """What a copy of the head is in by which drafts are scored, on GPUs of this compute capability. None: there is
        none, for no GPU of the kind multiplies less than half precision, the head is in another one, or some rank's
        share is so small that it saves next to nothing to read a part of it.
        """
        spec, least = self.spec, min(len(shard.vocab) for shard in self.shards)
        large = 2 * least * spec.hidden >= NARROWED_FROM
        if not spec.draft_head or not capability or FORMATS[spec.dtype].bits != 16 or not large:
            return None
        major, minor = map(int, capability.split("."))
        if major == HOPPER and 2 * least * spec.hidden >= FOUR_BITS_FROM:
            return FOUR_BIT_HEAD
        return FORMATS["fp8"] if (major, minor) >= MULTIPLIES_FP8 else None

    def narrow_head_bytes(self, rank: int, capability: str) -> int:
        """Of this rank's share of that copy, or 0."""
        narrow = self.narrow_head(capability)
        return 0 if narrow is None else narrow.bytes(len(self.shards[rank].vocab), self.spec.hidden)

    def kv_bytes_per_token(self, rank: int, number_format: str = "bf16") -> int:
        """Bytes of keys and values this rank keeps of one token."""
        held = len(self.shards[rank].kv_heads)
        return self.spec.kv_bytes_per_token(number_format) * held // self.spec.kv_heads

    def block_bytes(self, rank: int, block_size: int, number_format: str = "bf16") -> int:
        """Bytes of a block of so many tokens on this rank, in all layers that have memory for blocks."""
        element = FORMATS[number_format].bits / 8
        kinds = self.spec.block_kinds
        return sum(
            layers * int(cache.block_numbers(block_size) * element * self._share(cache, rank))
            for cache, layers in kinds
        )

    def cache_bytes(self, rank: int, tokens: int, number_format: str = "bf16") -> dict[CacheKind, int]:
        """Bytes this rank keeps of a sequence of `tokens`, by kind of layer: windows and fixed states included."""
        element = FORMATS[number_format].bits / 8
        kept: dict[CacheKind, int] = {}
        for cache, layers in self.spec.cache_kinds:
            size = int(cache.bytes(tokens, element) * self._share(cache, rank))
            kept[cache.kind] = kept.get(cache.kind, 0) + layers * size
        return kept

    def state_bytes(self, cache: LayerCache, rank: int) -> int:
        """Bytes that a rank of Phalanx's keeps of a sequence in such a layer whatever the length."""
        return int((cache.state_bytes + cache.beside_bytes) * self._share(cache, rank))

    def _share(self, cache: LayerCache, rank: int) -> float:
        shard, spec = self.shards[rank], self.spec
        if cache.kind == "state":
            return len(shard.state_heads) / spec.state_heads
        return len(shard.kv_heads) / spec.kv_heads
