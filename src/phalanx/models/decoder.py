"""The pre-norm decoder that llama, qwen2, qwen3, qwen3_moe and mixtral share; the spec says where they differ."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, Masks
from phalanx.kernels.fp8 import Quantised
from phalanx.kernels.gemm import Gemm
from phalanx.layers.attention import Attention
from phalanx.layers.linear import Part
from phalanx.layers.mlp import Experts, Mlp
from phalanx.layers.norm import RmsNorm
from phalanx.layers.place import Place
from phalanx.layers.rotary import Rotary
from phalanx.layers.vocabulary import Embedding, Head


class DecoderLayer:
    """Attention and MLP, each with a norm before and the residual around: two all-reduces."""

    def __init__(self, place: Place, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        self.attention_norm = RmsNorm(place, prefix + "input_layernorm")
        self.attention = Attention(place, layer)
        self.mlp_norm = RmsNorm(place, prefix + "post_attention_layernorm")
        self.mlp = Experts(place, layer) if place.spec.is_sparse(layer) else Mlp(place, layer)

    def parts(self) -> Iterator[tuple[str, Part]]:
        for part in (self.attention_norm, self.attention, self.mlp_norm, self.mlp):
            yield from part.parts()

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        masks: Masks,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output as this rank's part of what it adds, and what it is added to; the next norm does the sum.

        So comes x, except to the first layer, which has no residual yet and takes it whole. `rows` are those to go on
        with behind the attention, all by default.
        """
        normed = _norm(self.attention_norm, x, residual, self.attention.takes_fp8)
        residual = x if residual is None else residual
        attended = self.attention(normed, cos, sin, batch, masks, rows)
        residual = residual if rows is None else residual[rows]
        return self.mlp(_norm(self.mlp_norm, attended, residual, self.mlp.takes_fp8)), residual


def _norm(norm: RmsNorm, x: Tensor, residual: Tensor | None, in_fp8: bool) -> Tensor | Quantised:
    if residual is not None:
        return norm.of_sum(x, residual, in_fp8)
    return norm.quantised(x) if in_fp8 else norm(x)


class Decoder:
    """One rank's share of a decoder-only model. Built empty: `parts` names what has to be loaded."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.embedding = Embedding(place)
        self.layers = [DecoderLayer(place, layer) for layer in range(place.spec.layers)]
        self.norm = RmsNorm(place, "model.norm")
        self.head = Head(place, self.embedding)

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Checkpoint names and, for each, the memory that this rank's share of it goes to."""
        yield from self.embedding.parts()
        for layer in self.layers:
            yield from layer.parts()
        yield from self.norm.parts()
        yield from self.head.parts()

    def products(self) -> Iterator[Gemm]:
        """The products whose weights are held as they are multiplied."""
        for layer in self.layers:
            products = [layer.attention.qkv.product, layer.attention.output.product]
            if isinstance(layer.mlp, Mlp):
                products += [layer.mlp.gate_up.product, layer.mlp.down.product]
            yield from (product for product in products if isinstance(product, Gemm))
        yield self.head.product

    @property
    def cache_bytes_per_token(self) -> int:
        return sum(layer.attention.cache_bytes_per_token for layer in self.layers)

    def allocate_cache(self, max_positions: int, blocks: int, block_size: int) -> None:
        """Make room for the keys and values of all sequences; `max_positions` bounds the length of one.

        One block more than asked for stays spare, for rows that only fill up a batch.
        """
        self.block_size = block_size
        self.spare_block = blocks
        self.rotary = Rotary(self.place, max_positions)
        for layer in self.layers:
            layer.attention.allocate_cache(blocks + 1, block_size)

    def __call__(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor | None = None) -> Tensor:
        """Hidden states before the last norm: of these rows, at least one of them, or of all.

        No row looks at another one behind the last attention, so there the others are left out.
        """
        masks = Masks(batch, self.block_size, self.place.dtype)
        cos, sin = self.rotary(positions)
        x, residual = self.embedding(tokens), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, cos, sin, batch, masks)
        x, residual = self.layers[-1](x, residual, cos, sin, batch, masks, rows)
        return residual.add_(self.place.group.all_reduce(x))

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits over the whole vocabulary, in the model's dtype, the same bits on every rank."""
        return self.head(self.norm(hidden))
