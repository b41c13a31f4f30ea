"""ModelSpec: what a model is, in numbers. The runtime shards by it, planner and doctor count and check by it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from phalanx.errors import ConfigError
from phalanx.spec.cache import LayerCache, WindowGroup, window_groups
from phalanx.spec.delta import DeltaNet
from phalanx.spec.draft_head import DraftHead
from phalanx.spec.ffn import Moe
from phalanx.spec.formats import FORMATS, PLAIN, NumberFormat
from phalanx.spec.hyper import Hyper
from phalanx.spec.layer import Layer, Norms
from phalanx.spec.rope import Rope
from phalanx.spec.schemes import DEFAULTS, Quantization, Scheme
from phalanx.spec.tensors import Spelling, Tensor


class Refusal(NamedTuple):
    """Why the runtime cannot serve a model that can be planned."""

    code: str
    found: str
    fix: str


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, layer by layer: what each holds, keeps of a sequence, and how ranks share it.

    What is embedded is multiplied by `embedding_scale`, what a layer's parts add by `residual_scale`, logits by
    `logit_scale`. Names of checkpoints may begin otherwise than here: `prefixes` pairs what a name begins with here
    with what it may begin with there, and `spellings` tell which parts of names it may write otherwise. With `hyper`
    there are several residual streams. `head` is one that drafts, which a checkpoint may have: it is a part of the
    model only where `drafts` is set; with `companion` a second model drafts for it, which keeps all blocks of a
    sequence. Tensors that match one of the patterns `ignored` are left alone, any other that is
    not known is refused. Where `refusal` is None the runtime serves the model.
    """

    model_type: str
    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    dtype: str
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    quantization: Quantization | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    hyper: Hyper | None = None
    head: DraftHead | None = None
    drafts: bool = False
    companion: bool = False
    prefixes: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    spellings: tuple[Spelling, ...] = field(default=(), repr=False)
    ignored: tuple[str, ...] = field(default=(), repr=False)
    refusal: Refusal | None = None

    @property
    def number_format(self) -> str:
        """The format of the linear layers."""
        return self.quantization.format.name if self.quantization else self.dtype

    def in_format(self, number_format: str) -> ModelSpec:
        """The same model with its linear layers in another format: the same object every time, which has counted its
        tensors already.
        """
        if number_format not in self._formatted:
            self._formatted[number_format] = self._convert(number_format)
        return self._formatted[number_format]

    @cached_property
    def _formatted(self) -> dict[str, ModelSpec]:
        return {self.number_format: self}

    def _convert(self, number_format: str) -> ModelSpec:
        if number_format in PLAIN:
            return dataclasses.replace(self, quantization=None, dtype=number_format)
        return dataclasses.replace(self, quantization=Quantization.usual(number_format))

    def with_drafts(self) -> ModelSpec:
        """The same model with the head that drafts."""
        return dataclasses.replace(self, drafts=self.head is not None)

    @cached_property
    def without_drafts(self) -> ModelSpec:
        return dataclasses.replace(self, drafts=False) if self.drafts else self

    @property
    def draft_head(self) -> DraftHead | None:
        """Where it is a part of the model."""
        return self.head if self.drafts else None

    @cached_property
    def all_layers(self) -> tuple[Layer, ...]:
        """With that of the head that drafts behind the others."""
        return (*self.layers, self.head.layer) if self.head and self.drafts else self.layers

    @cached_property
    def _attending(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.mixer.heads)

    @property
    def heads(self) -> int:
        """Query heads of the layers that attend."""
        return self._attending[0].mixer.heads

    @property
    def kv_heads(self) -> int:
        return self._attending[0].mixer.kv_heads

    @property
    def head_dim(self) -> int:
        return self._attending[0].mixer.head_dim

    @property
    def latent(self) -> bool:
        """Whether every rank keeps what all heads share."""
        return self._attending[0].mixer.latent

    @property
    def head_group(self) -> int:
        """Query heads that no rank may share out."""
        return self._attending[0].mixer.head_group

    @cached_property
    def state_heads(self) -> int:
        """Heads of recurrent states; 0 where no layer has any."""
        return max(layer.mixer.state_heads for layer in self.layers)

    @cached_property
    def state_value_heads(self) -> int:
        return max(layer.mixer.state_value_heads for layer in self.layers)

    @cached_property
    def state_format(self) -> str | None:
        """That recurrent states are kept in; None where there are none."""
        return next((layer.mixer.state_format for layer in self.layers if isinstance(layer.mixer, DeltaNet)), None)

    @property
    def streams(self) -> int:
        """Residual streams beside each other."""
        return self.hyper.streams if self.hyper else 1

    @property
    def query_group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @cached_property
    def intermediate(self) -> int:
        """Inner columns of the dense MLPs; 0 where no layer has one."""
        return max(layer.ffn.width for layer in self.layers)

    @cached_property
    def sparse(self) -> tuple[Moe, ...]:
        """The layers of routed experts."""
        return tuple(layer.ffn for layer in self.layers if isinstance(layer.ffn, Moe))

    @property
    def moe(self) -> Moe | None:
        """What the layers of routed experts have in common."""
        return self.sparse[0] if self.sparse else None

    @cached_property
    def ropes(self) -> set[Rope]:
        """The ways in which layers turn queries and keys."""
        return {layer.mixer.rope for layer in self.all_layers if layer.mixer.rope is not None}

    @cached_property
    def caches(self) -> tuple[LayerCache, ...]:
        """What each layer keeps of a sequence."""
        return tuple(layer.mixer.cache for layer in self.all_layers)

    @cached_property
    def has_states(self) -> bool:
        """Whether some layer keeps something of a sequence that does not lie in blocks of its tokens."""
        return any(cache.state_bytes for cache in self.caches)

    @cached_property
    def goes_back(self) -> bool:
        """Whether all such layers can go on before the last tokens they have seen."""
        return all(cache.goes_back for cache in self.caches if cache.state_bytes)

    def going_back(self, tokens: int) -> ModelSpec:
        """The same model, whose recurrent states can go back by so many tokens."""
        return self._with_nets(pending=tokens)

    def keeping_states_in(self, asked: str) -> ModelSpec:
        """The same model, whose recurrent states are kept in this format; `auto` is the usual one."""
        if asked == "auto":
            return self
        if not self.state_heads:
            raise ConfigError(
                "no_states",
                f"state_dtype is {asked!r}, but {self.model_type} has no recurrent states.",
                "Leave state_dtype out.",
            )
        return self._with_nets(state_format=asked)

    def _with_nets(self, **changed: Any) -> ModelSpec:
        layers = (
            dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **changed))
            if isinstance(layer.mixer, DeltaNet)
            else layer
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=tuple(layers))

    @cached_property
    def recurrent_bytes(self) -> int:
        """Bytes of states that every token reads and writes whole, over all ranks."""
        return sum(cache.state_bytes for cache in self.caches if cache.kind == "state")

    @cached_property
    def cache_kinds(self) -> tuple[tuple[LayerCache, int], ...]:
        """Caches that differ, and how many layers have each: quick to count by."""
        return tuple(Counter(self.caches).items())

    @cached_property
    def window_groups(self) -> tuple[WindowGroup, ...]:
        """Layers that give up blocks behind their window."""
        groups = window_groups(self.caches, self.max_positions)
        return () if self.companion and self._all_windowed(groups) else groups

    def _all_windowed(self, groups: tuple[WindowGroup, ...]) -> bool:
        return sum(len(group.layers) for group in groups) == sum(cache.width > 0 for cache in self.caches)

    @cached_property
    def keeps_all_tokens(self) -> bool:
        """Whether some layer keeps blocks of whole sequences, or has none at all to give up."""
        return not self.window_groups or not self._all_windowed(self.window_groups)

    @cached_property
    def with_blocks(self) -> tuple[int, ...]:
        """Layers that have memory for blocks: those that keep all tokens, or, where none does, all that there are. The
        others use the memory of these.
        """
        guests = {number for group in self.window_groups for number in group.layers} if self.keeps_all_tokens else set()
        return tuple(number for number in range(len(self.caches)) if number not in guests)

    @cached_property
    def block_kinds(self) -> tuple[tuple[LayerCache, int], ...]:
        """What these keep, and how many keep it."""
        return tuple(Counter(self.caches[number] for number in self.with_blocks).items())

    @cached_property
    def stacked_tensors(self) -> tuple[Tensor, ...]:
        """Every tensor in the order the forward pass meets them, those of all experts of a layer as one with copies."""
        return tuple(self._list_tensors())

    def _list_tensors(self) -> Iterator[Tensor]:
        yield Tensor("model.embed_tokens.weight", (self.vocab, self.hidden), "vocab")
        for number, layer in enumerate(self.layers):
            yield from layer.tensors(f"model.layers.{number}.", self.hidden)
            if self.hyper is not None:
                yield from self.hyper.around_parts(f"model.layers.{number}.", self.hidden)
        if self.hyper is not None:
            yield from self.hyper.at_the_end("model.", self.hidden)
        if self.draft_head is not None:
            yield from self.draft_head.tensors(self.hidden, self.hyper)
        yield self.final_norms.tensor("model.norm.weight", self.hidden)
        if not self.tied_embeddings:
            yield Tensor("lm_head.weight", (self.vocab, self.hidden), "vocab")

    @property
    def final_norms(self) -> Norms:
        return self.layers[-1].norms

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, those of every expert on their own."""
        return {tensor.name: tensor for stacked in self.stacked_tensors for tensor in stacked.each()}

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
        return self._format(tensor, number_format).bytes(*shape)

    def _format(self, tensor: Tensor, name: str) -> NumberFormat:
        own = self.quantization if self.number_format == name else None
        return FORMATS[name] if own is None else own.scheme_for(tensor.expert).format

    def scheme_of(self, tensor: Tensor) -> Scheme | None:
        """How a checkpoint keeps a matrix if it keeps it quantised; block FP8 where the configuration says nothing."""
        if not tensor.is_linear:
            return None
        return DEFAULTS["fp8"] if self.quantization is None else self.quantization.scheme_for(tensor.expert)

    def is_quantised(self, tensor: Tensor) -> bool:
        if not tensor.is_linear or self.quantization is None:
            return tensor.is_linear
        stored = [source.name for source in tensor.sources] or [tensor.name]
        return not self.quantization.skips([name for each in stored for name in self.names(each)])

    def names(self, stored: str) -> Iterator[str]:
        """What a checkpoint may call a tensor, whatever its names begin with."""
        yield stored
        yield from (theirs + stored.removeprefix(ours) for ours, theirs in self.prefixes if stored.startswith(ours))

    def kv_bytes_per_token(self, number_format: str = "bf16") -> int:
        """Bytes a token adds to the caches of all layers and KV heads while it is in reach of every layer."""
        element = FORMATS[number_format].bits / 8
        return int(sum(layers * cache.numbers_per_token for cache, layers in self.cache_kinds) * element)

    def cache_bytes(self, tokens: int, number_format: str = "bf16") -> int:
        """Bytes that a sequence of `tokens` keeps in all layers, windows and fixed states included."""
        return sum(cache.bytes(tokens, FORMATS[number_format].bits / 8) for cache in self.caches)

    def flops_per_token(self, context: int = 0) -> int:
        """Multiply-adds times two for one token that attends to `context` tokens, itself included.

        The embedding is a look-up, the head a product: a tied matrix counts once, an untied one through its head.
        """
        multiplied = self.active_parameters - (0 if self.tied_embeddings else self.vocab * self.hidden)
        attended = sum(
            min(context, reach or context) * layer.mixer.heads * each
            for layer in self._attending
            for reach, each in layer.mixer.pairs
        )
        return 2 * multiplied + int(2 * attended)
