"""Gated MLP, dense and routed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor

from phalanx.kernels.activation import silu_and_mul, silu_and_mul_quantised
from phalanx.kernels.fp8 import Fp8Weight, Quantised
from phalanx.kernels.gemm import Gemm
from phalanx.kernels.moe import fused_experts, route
from phalanx.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from phalanx.layers.place import Place


class Mlp:
    def __init__(self, place: Place, layer: int) -> None:
        prefix, bias = f"model.layers.{layer}.mlp.", place.spec.mlp_bias
        self.gate_up = ColumnParallelLinear(place, [prefix + "gate_proj", prefix + "up_proj"], bias)
        self.down = RowParallelLinear(place, prefix + "down_proj", bias)

    @property
    def takes_fp8(self) -> bool:
        return self.gate_up.product.takes_fp8

    def parts(self) -> Iterator[tuple[str, Part]]:
        return chain(self.gate_up.parts(), self.down.parts())

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        entered = self.gate_up(x)
        return self.down(silu_and_mul_quantised(entered) if self.down.product.takes_fp8 else silu_and_mul(entered))


class Experts:
    """Routed experts. Every rank holds a slice of each expert's inner dimension and routes alike.

    It returns its part of a sum over ranks, which the next norm does.
    """

    def __init__(self, place: Place, layer: int) -> None:
        spec, moe = place.spec, place.spec.moe
        assert moe is not None
        block, *self.names = spec.expert_names
        self.prefix = f"model.layers.{layer}.{block}."
        self.moe = moe
        self.inner = len(place.shard.expert_ffn)
        self.router = Gemm(place.empty(moe.experts, spec.hidden))
        self.gate_up = self._stack(place, [self.inner, self.inner], spec.hidden)
        self.down = self._stack(place, [spec.hidden], self.inner)

    def _stack(self, place: Place, rows: list[int], columns: int) -> Part:
        shape = (self.moe.experts, sum(rows), columns)
        names = [f"{self.prefix}experts.0.{name}.weight" for name in self.names]
        if all(map(place.keeps_fp8, names)):
            return Fp8Weight.empty(*shape, row_block=place.row_block(rows), device=place.device)
        return place.empty(*shape)

    takes_fp8 = False
    """The router wants its input as it is; what the experts take is brought to FP8 behind it."""

    def parts(self) -> Iterator[tuple[str, Part]]:
        gate, up, down = self.names
        yield f"{self.prefix}gate.weight", self.router.weight
        for expert in range(self.moe.experts):
            path = f"{self.prefix}experts.{expert}."
            first, second = self.gate_up[expert].split([self.inner, self.inner])
            yield f"{path}{gate}.weight", first
            yield f"{path}{up}.weight", second
            yield f"{path}{down}.weight", self.down[expert]

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        assert isinstance(x, Tensor)
        weights, experts = route(self.router(x), self.moe.experts_per_token, self.moe.renormalise)
        return fused_experts(x, self.gate_up, self.down, weights, experts)
