"""ModelSpec: what a model is, in numbers. The runtime shards by it, planner and doctor count and check by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

Split = Literal["query", "kv", "ffn", "expert_ffn", "vocab"]

BYTES_PER_ELEMENT = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int4": 0.5}
SCALE_BYTES = 4
INT4_GROUP = 128


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
    """Routed experts: softmax over all experts, the best `experts_per_token` run."""

    experts: int
    experts_per_token: int
    intermediate: int
    renormalise: bool
    sparse_layers: frozenset[int]


@dataclass(frozen=True)
class BlockFp8:
    """Weights stored as e4m3 with one scale per `block` x `block` tile."""

    block: int
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint: its name, its whole shape, and the axis along which ranks share it."""

    name: str
    shape: tuple[int, ...]
    split: Split | None = None
    axis: int = 0
    is_linear: bool = False
    expert: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer: pre-norm, grouped-query attention, gated MLP or routed experts."""

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
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    block_fp8: BlockFp8 | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    expert_names: tuple[str, str, str, str] = field(default=("mlp", "gate_proj", "up_proj", "down_proj"), repr=False)

    @classmethod
    def from_config(cls, source: Mapping[str, Any] | str | Path) -> ModelSpec:
        """Read a Hugging Face `config.json`: the file, its folder, or what it holds."""
        from phalanx.spec.config import read_config

        return read_config(source)

    @property
    def query_group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.sparse_layers

    def window(self, layer: int) -> int | None:
        """Positions a token of this layer may look back on, itself included; None means all of them."""
        return self.windows[layer] if self.windows else None

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the checkpoint by name, in the order the forward pass meets them."""
        return {tensor.name: tensor for tensor in self._list_tensors()}

    def _list_tensors(self) -> Iterator[Tensor]:
        yield Tensor("model.embed_tokens.weight", (self.vocab, self.hidden), "vocab")
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield Tensor(prefix + "input_layernorm.weight", (self.hidden,))
            yield from self._attention_tensors(prefix + "self_attn.")
            yield Tensor(prefix + "post_attention_layernorm.weight", (self.hidden,))
            if self.is_sparse(layer):
                yield from self._expert_tensors(prefix)
            else:
                yield from self._mlp_tensors(prefix + "mlp.")
        yield Tensor("model.norm.weight", (self.hidden,))
        if not self.tied_embeddings:
            yield Tensor("lm_head.weight", (self.vocab, self.hidden), "vocab")

    def _attention_tensors(self, prefix: str) -> Iterator[Tensor]:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        splits: tuple[tuple[str, int, Split], ...] = (("q", query, "query"), ("k", kv, "kv"), ("v", kv, "kv"))
        for letter, rows, split in splits:
            yield Tensor(f"{prefix}{letter}_proj.weight", (rows, self.hidden), split, is_linear=True)
            if self.qkv_bias:
                yield Tensor(f"{prefix}{letter}_proj.bias", (rows,), split)
        if self.qk_norm:
            yield Tensor(prefix + "q_norm.weight", (self.head_dim,))
            yield Tensor(prefix + "k_norm.weight", (self.head_dim,))
        yield Tensor(prefix + "o_proj.weight", (self.hidden, query), "query", axis=1, is_linear=True)
        if self.output_bias:
            yield Tensor(prefix + "o_proj.bias", (self.hidden,))

    def _mlp_tensors(self, prefix: str) -> Iterator[Tensor]:
        for name in ("gate_proj", "up_proj"):
            yield Tensor(f"{prefix}{name}.weight", (self.intermediate, self.hidden), "ffn", is_linear=True)
            if self.mlp_bias:
                yield Tensor(f"{prefix}{name}.bias", (self.intermediate,), "ffn")
        yield Tensor(prefix + "down_proj.weight", (self.hidden, self.intermediate), "ffn", axis=1, is_linear=True)
        if self.mlp_bias:
            yield Tensor(prefix + "down_proj.bias", (self.hidden,))

    def _expert_tensors(self, prefix: str) -> Iterator[Tensor]:
        assert self.moe is not None
        block, gate, up, down = self.expert_names
        wide, narrow = (self.moe.intermediate, self.hidden), (self.hidden, self.moe.intermediate)
        yield Tensor(f"{prefix}{block}.gate.weight", (self.moe.experts, self.hidden))
        for expert in range(self.moe.experts):
            path = f"{prefix}{block}.experts.{expert}."
            yield Tensor(f"{path}{gate}.weight", wide, "expert_ffn", is_linear=True, expert=True)
            yield Tensor(f"{path}{up}.weight", wide, "expert_ffn", is_linear=True, expert=True)
            yield Tensor(f"{path}{down}.weight", narrow, "expert_ffn", axis=1, is_linear=True, expert=True)

    @cached_property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors.values())

    @cached_property
    def active_parameters(self) -> int:
        """Parameters one token passes through: everything but the experts it is not routed to."""
        routed = sum(tensor.elements for tensor in self.tensors.values() if tensor.expert)
        if self.moe is None:
            return self.parameters
        return self.parameters - routed + routed * self.moe.experts_per_token // self.moe.experts

    def weight_bytes(self, number_format: str) -> int:
        """Bytes of all weights. `fp8` and `int4` apply to the linear layers, with their scales; the rest stays bf16."""
        return sum(self.tensor_bytes(tensor, tensor.shape, number_format) for tensor in self.tensors.values())

    def tensor_bytes(self, tensor: Tensor, shape: tuple[int, ...], number_format: str) -> int:
        """Bytes of `shape` elements of this tensor (a whole tensor or a shard of it) in a number format."""
        if number_format in ("fp32", "bf16", "fp16") or not self.is_quantised(tensor.name):
            size = BYTES_PER_ELEMENT[number_format] if number_format == "fp32" else 2.0
            return int(prod(shape) * size)
        rows, columns = shape
        payload = int(rows * columns * BYTES_PER_ELEMENT[number_format])
        if number_format == "int4":
            return payload + rows * -(-columns // INT4_GROUP) * 2
        block = self.block_fp8.block if self.block_fp8 else 128
        return payload + -(-rows // block) * -(-columns // block) * SCALE_BYTES

    def is_quantised(self, name: str) -> bool:
        """Whether a number format such as `fp8` applies to this tensor."""
        skipped = self.block_fp8.skipped if self.block_fp8 else ()
        return self.tensors[name].is_linear and not any(name.startswith(f"{module}.") for module in skipped)

    def kv_bytes_per_token(self, number_format: str = "bf16") -> int:
        """Bytes of keys and values one token keeps, over all layers and all KV heads."""
        return int(2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_ELEMENT[number_format])

    def flops_per_token(self, context: int = 0) -> int:
        """Multiply-adds times two for one token that attends to `context` tokens, itself included.

        The embedding is a look-up, the head a product: a tied matrix counts once, an untied one through its head.
        """
        multiplied = self.active_parameters - (0 if self.tied_embeddings else self.vocab * self.hidden)
        looked_at = sum(min(context, self.window(layer) or context) for layer in range(self.layers))
        return 2 * multiplied + 4 * looked_at * self.heads * self.head_dim
