"""Place: where a layer is built."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.fabric.group import Group
from phalanx.kernels.fp8 import E4M3, GROUP, row_block_of
from phalanx.spec import Layout, ModelSpec, Shard

_KEPT_TILES = ((GROUP, GROUP), (1, None))


@dataclass(frozen=True)
class Place:
    """Which rank's share of which model, talking to whom, in which dtype on which device.

    `fp8` says whether weights stored in FP8 stay so; otherwise they are widened when they are loaded. `fp8_cache` is
    for keys and values, which otherwise have the dtype of all.
    """

    layout: Layout
    group: Group
    dtype: torch.dtype
    device: torch.device
    fp8: bool = False
    fp8_cache: bool = False

    @property
    def spec(self) -> ModelSpec:
        return self.layout.spec

    @property
    def shard(self) -> Shard:
        return self.layout.shards[self.group.rank]

    def share_of(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's share of a checkpoint tensor."""
        return self.layout.shape(self.spec.tensors[name], self.group.rank)

    def keeps_fp8(self, name: str) -> bool:
        """Whether this checkpoint tensor is held in FP8."""
        stored = self.spec.stored_fp8
        return (
            self.fp8
            and stored is not None
            and stored.format.tile in _KEPT_TILES
            and self.spec.is_quantised(self.spec.tensors[name])
        )

    def row_block(self, parts: list[int]) -> int:
        """Rows that share a scale when matrices of these heights are stacked and held in FP8."""
        assert self.spec.stored_fp8 is not None
        return row_block_of(parts, self.spec.stored_fp8.block)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def empty_for(self, name: str) -> Tensor:
        """Memory for this rank's share of a tensor that is held as it is, in float32 where that is meant."""
        dtype = torch.float32 if self.spec.tensors[name].wide else self.dtype
        return torch.empty(self.share_of(name), dtype=dtype, device=self.device)

    def has(self, name: str) -> bool:
        """Whether the model has such a tensor."""
        return name in self.spec.tensors

    def empty_cache(self, *entry: int) -> Tensor:
        """What a layer keeps of tokens, [blocks, block_size, *entry], without a block yet."""
        dtype = E4M3 if self.fp8_cache else self.dtype
        return torch.empty(0, 0, *entry, dtype=dtype, device=self.device)
