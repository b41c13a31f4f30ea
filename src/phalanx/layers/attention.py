"""Grouped-query attention; each rank holds whole KV-head groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, Masks, paged_attention
from phalanx.kernels.cache import UNSCALED
from phalanx.kernels.fp8 import Quantised
from phalanx.kernels.rotary import HeadNorms, rotate_and_store
from phalanx.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from phalanx.layers.norm import RmsNorm
from phalanx.layers.place import Place


class Attention:
    def __init__(self, place: Place, layer: int) -> None:
        spec, prefix = place.spec, f"model.layers.{layer}.self_attn."
        self.prefix = prefix
        self.head_dim = spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.heads, self.kv_heads = len(place.shard.query_heads), len(place.shard.kv_heads)
        self.window = spec.window(layer)
        self.qkv = ColumnParallelLinear(place, [f"{prefix}{letter}_proj" for letter in "qkv"], spec.qkv_bias)
        self.output = RowParallelLinear(place, prefix + "o_proj", spec.output_bias)
        self.norms = [RmsNorm(place, prefix + name) for name in ("q_norm", "k_norm")] if spec.qk_norm else []
        weights = [norm.weight for norm in self.norms]
        self.head_norms = HeadNorms(weights[0], weights[1], spec.norm_eps) if weights else None
        self.cache = place.empty_cache(self.kv_heads)
        self.cache_scales = UNSCALED

    @property
    def takes_fp8(self) -> bool:
        return self.qkv.product.takes_fp8

    def parts(self) -> Iterator[tuple[str, Part]]:
        return chain(self.qkv.parts(), *(norm.parts() for norm in self.norms), self.output.parts())

    @property
    def cache_bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.cache.element_size()

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        self.cache = self.cache.new_zeros(blocks, block_size, 2, self.kv_heads, self.head_dim)

    def __call__(
        self,
        x: Tensor | Quantised,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        masks: Masks,
        rows: Tensor | None = None,
    ) -> Tensor:
        """This rank's part of what attention adds to these rows, all by default."""
        qkv = self.qkv(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        cache, scales = self.cache, self.cache_scales
        rotate_and_store(qkv, cos, sin, batch.write_to, cache, self.heads, self.kv_heads, self.head_norms, scales)
        scale = self.scale * scales.key
        attended = paged_attention(qkv, self.heads, cache, batch, masks, self.window, scale, scales.value)
        attended = attended.flatten(1)
        return self.output(attended if rows is None else attended[rows])
