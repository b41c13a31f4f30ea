"""ModelSpec: what a model is, in numbers. The runtime shards by it, planner and doctor count and check by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from phalanx.spec.formats import FORMATS, FP8_FORMATS, PLAIN, NumberFormat, Quantization

Split = Literal["query", "kv", "ffn", "expert_ffn", "shared_ffn", "state", "vocab"]
CacheKind = Literal["full", "sliding", "chunked", "latent", "state"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. `kind` names how long contexts are reached."""

    theta: float
    rotary_dim: int
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Moe:
    """Routed experts, the best `experts_per_token` of them run; `shared` columns of a further expert always run."""

    experts: int
    experts_per_token: int
    intermediate: int
    renormalise: bool
    sparse_layers: frozenset[int]
    shared: int = 0
    shared_gate: bool = False
    correction_bias: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: of a token, one latent of `kv_rank + rope_dim` numbers is kept for all heads."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def width(self) -> int:
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class Indexer:
    """Chooses the `top_k` tokens that sparse attention looks at; keeps a key of `head_dim` numbers a token."""

    heads: int
    head_dim: int
    top_k: int
    layers: frozenset[int]


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net in `layers`: a state of fixed size in place of keys and values."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int
    layers: frozenset[int]
    fused: bool = False

    @property
    def channels(self) -> int:
        """Columns that pass the convolution: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def state_bytes(self) -> int:
        """The recurrent state in float32, and the columns the convolution looks back on in bf16."""
        return 4 * self.v_heads * self.k_dim * self.v_dim + 2 * self.channels * (self.kernel - 1)


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


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint: its name, its whole shape, and the axis along which ranks share it.

    A `*` in the name stands for the number of an expert, and the tensor for its `copies`.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None = None
    axis: int = 0
    is_linear: bool = False
    expert: bool = False
    copies: int = 1

    @property
    def elements(self) -> int:
        return prod(self.shape)


class Refusal(NamedTuple):
    """Why the runtime cannot serve a model that can be planned."""

    code: str
    found: str
    fix: str


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer: what every layer holds, keeps of a sequence, and how ranks share it.

    Where `refusal` is None the runtime serves it, and `tensors` are the checkpoint's own by name and shape; otherwise
    they are the same numbers of weights, for planning.
    """

    model_type: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope: Rope
    max_positions: int
    tied_embeddings: bool
    dtype: str
    moe: Moe | None = None
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_gate: bool = False
    sinks: bool = False
    windows: tuple[int | None, ...] = ()
    chunked: bool = False
    mla: Mla | None = None
    indexer: Indexer | None = None
    delta: DeltaNet | None = None
    quantization: Quantization | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    expert_names: tuple[str, str, str, str] = field(default=("mlp", "gate_proj", "up_proj", "down_proj"), repr=False)
    refusal: Refusal | None = None

    @classmethod
    def from_config(cls, source: Mapping[str, Any] | str | Path) -> ModelSpec:
        """Read a Hugging Face `config.json` (the file, its folder, or what it holds) of a model that can be served."""
        from phalanx.spec.config import read_config

        return read_config(source)

    @property
    def stored_fp8(self) -> Quantization | None:
        """The quantization if it is one the runtime loads: e4m3 with a scale per square block or per output channel."""
        return self.quantization if self.quantization and self.quantization.format.name in FP8_FORMATS else None

    @property
    def number_format(self) -> str:
        """The format of the linear layers."""
        return self.quantization.format.name if self.quantization else self.dtype

    def in_format(self, number_format: str) -> ModelSpec:
        """The same model with its linear layers in another format."""
        if number_format == self.number_format:
            return self
        if number_format in PLAIN:
            return dataclasses.replace(self, quantization=None, dtype=number_format)
        return dataclasses.replace(self, quantization=Quantization(FORMATS[number_format]))

    @property
    def query_group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.sparse_layers

    def is_recurrent(self, layer: int) -> bool:
        return self.delta is not None and layer in self.delta.layers

    def window(self, layer: int) -> int | None:
        """Positions a token of this layer may look back on, itself included; None means all of them."""
        return self.windows[layer] if self.windows else None

    @cached_property
    def caches(self) -> tuple[LayerCache, ...]:
        """What each layer keeps of a sequence."""
        return tuple(self._cache(layer) for layer in range(self.layers))

    def _cache(self, layer: int) -> LayerCache:
        if self.delta is not None and layer in self.delta.layers:
            return LayerCache("state", state_bytes=self.delta.state_bytes)
        if self.mla is not None:
            index = self.indexer.head_dim if self.indexer else 0
            return LayerCache("latent", 1, self.mla.width + index)
        reach = self.window(layer)
        kind: CacheKind = "full" if reach is None else "chunked" if self.chunked else "sliding"
        return LayerCache(kind, self.kv_heads, 2 * self.head_dim, reach)

    @cached_property
    def stacked_tensors(self) -> tuple[Tensor, ...]:
        """Every tensor in the order the forward pass meets them, those of all experts of a layer as one with copies."""
        from phalanx.spec.tensors import list_tensors

        return tuple(list_tensors(self))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the checkpoint by name, in the order the forward pass meets them."""
        found: dict[str, Tensor] = {}
        for stacked, run in groupby(self.stacked_tensors, key=lambda tensor: "*" in tensor.name):
            group = list(run)
            for expert in range(group[0].copies) if stacked else (0,):
                for tensor in group:
                    name = tensor.name.replace("*", str(expert))
                    found[name] = dataclasses.replace(tensor, name=name, copies=1) if stacked else tensor
        return found

    @cached_property
    def tensor_kinds(self) -> tuple[tuple[Tensor, int], ...]:
        """Tensors that differ in more than their name, and how many there are of each: quick to count by."""
        counts: dict[tuple[Any, ...], tuple[Tensor, int]] = {}
        for tensor in self.stacked_tensors:
            key = (tensor.shape, tensor.split, tensor.axis, tensor.expert, self.is_quantised(tensor))
            first, count = counts.get(key, (tensor, 0))
            counts[key] = first, count + tensor.copies
        return tuple(counts.values())

    @cached_property
    def parameters(self) -> int:
        return sum(tensor.elements * count for tensor, count in self.tensor_kinds)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters one token passes through: everything but the experts it is not routed to."""
        routed = sum(tensor.elements * count for tensor, count in self.tensor_kinds if tensor.expert)
        if self.moe is None:
            return self.parameters
        return self.parameters - routed + routed * self.moe.experts_per_token // self.moe.experts

    def weight_bytes(self, number_format: str) -> int:
        """Bytes of all weights. A quantised format applies to the linear layers, with scales; the rest stays bf16."""
        return sum(
            self.tensor_bytes(tensor, tensor.shape, number_format) * count for tensor, count in self.tensor_kinds
        )

    def tensor_bytes(self, tensor: Tensor, shape: tuple[int, ...], number_format: str) -> int:
        """Bytes of `shape` elements of this tensor (a whole tensor or a shard of it) in a number format."""
        if number_format in PLAIN:
            return prod(shape) * FORMATS[number_format].bits // 8
        if not self.is_quantised(tensor):
            return prod(shape) * 2
        return self._format(number_format).bytes(*shape)

    def _format(self, name: str) -> NumberFormat:
        own = self.quantization
        return own.format if own is not None and own.format.name == name else FORMATS[name]

    def is_quantised(self, tensor: Tensor) -> bool:
        return tensor.is_linear and not (self.quantization is not None and self.quantization.skips(tensor.name))

    def kv_bytes_per_token(self, number_format: str = "bf16") -> int:
        """Bytes a token adds to the caches of all layers and KV heads while it is in reach of every layer."""
        element = FORMATS[number_format].bits / 8
        return int(sum(cache.heads * cache.width for cache in self.caches) * element)

    def cache_bytes(self, tokens: int, number_format: str = "bf16") -> int:
        """Bytes that a sequence of `tokens` keeps in all layers, windows and fixed states included."""
        return sum(cache.bytes(tokens, FORMATS[number_format].bits / 8) for cache in self.caches)

    def flops_per_token(self, context: int = 0) -> int:
        """Multiply-adds times two for one token that attends to `context` tokens, itself included.

        The embedding is a look-up, the head a product: a tied matrix counts once, an untied one through its head.
        """
        multiplied = self.active_parameters - (0 if self.tied_embeddings else self.vocab * self.hidden)
        attending = (layer for layer in range(self.layers) if not self.is_recurrent(layer))
        looked_at = sum(min(context, self.window(layer) or context) for layer in attending)
        value_dim = self.mla.v_dim if self.mla else self.head_dim
        return 2 * multiplied + 2 * looked_at * self.heads * (self.head_dim + value_dim)
