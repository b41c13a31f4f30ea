"""Gated MLP, dense and routed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.activation import silu_and_mul
from phalanx.kernels.moe import fused_experts, route
from phalanx.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.layers.place import Place


class Mlp:
    def __init__(self, place: Place, layer: int) -> None:
        prefix, bias = f"model.layers.{layer}.mlp.", place.spec.mlp_bias
        self.gate_up = ColumnParallelLinear(place, [prefix + "gate_proj", prefix + "up_proj"], bias)
        self.down = RowParallelLinear(place, prefix + "down_proj", bias)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        return chain(self.gate_up.parts(), self.down.parts())

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))


class Experts:
    """Routed experts. Every rank holds a slice of each expert's inner dimension and routes alike: one all-reduce."""

    def __init__(self, place: Place, layer: int) -> None:
        spec, moe = place.spec, place.spec.moe
        assert moe is not None
        block, *self.names = spec.expert_names
        self.prefix = f"model.layers.{layer}.{block}."
        self.group = place.group
        self.moe = moe
        inner = len(place.shard.expert_ffn)
        self.router = place.empty(moe.experts, spec.hidden)
        self.gate_up = place.empty(moe.experts, 2 * inner, spec.hidden)
        self.down = place.empty(moe.experts, spec.hidden, inner)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        gate, up, down = self.names
        yield f"{self.prefix}gate.weight", self.router
        for expert in range(self.moe.experts):
            path = f"{self.prefix}experts.{expert}."
            first, second = self.gate_up[expert].chunk(2)
            yield f"{path}{gate}.weight", first
            yield f"{path}{up}.weight", second
            yield f"{path}{down}.weight", self.down[expert]

    def __call__(self, x: Tensor) -> Tensor:
        weights, experts = route(F.linear(x, self.router), self.moe.experts_per_token, self.moe.renormalise)
        return self.group.all_reduce(fused_experts(x, self.gate_up, self.down, weights, experts))
