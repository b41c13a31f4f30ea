"""Routed experts. Every rank holds a slice of each expert's inner dimension and routes alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.kernels.fp8 import Quantised
from phalanx.kernels.gemm import Product
from phalanx.kernels.invariant import invariant_experts
from phalanx.kernels.moe import ExpertWeights, fused_experts, route
from phalanx.kernels.panels import Panels
from phalanx.layers.ffn.dense import Mlp
from phalanx.layers.place import Part, Place
from phalanx.layers.step import StepContext
from phalanx.spec.ffn import Moe


class Experts:
    def __init__(self, place: Place, record: Moe, prefix: str) -> None:
        self.record, self.names = record, record.names
        self.path = f"{prefix}{record.names.block}."
        self.inner = len(place.shard.expert_ffn)
        hidden, first = place.spec.hidden, place.group.rank == 0
        router = f"{self.path}{self.names.router}."
        bias = place.empty_for(router + "bias") if record.router.bias else None
        self.units, self.alone = place.units, place.group.size == 1
        self.router = place.gemm(place.empty_for(router + "weight"), bias)
        correction = f"{self.path}{self.names.correction}"
        self.correction = place.empty_for(correction) if record.router.correction else None
        self.table = place.empty_for(f"{self.path}{self.names.table}") if record.router.hashed else None
        self.gate_up = self._stack(place, [self.inner, self.inner], hidden)
        self.down = self._stack(place, [hidden], self.inner)
        self.gate_up_bias = place.empty(record.experts, 2 * self.inner) if record.bias else None
        self.down_bias = place.empty(record.experts, hidden) if record.bias else None
        self.held = ExpertWeights(self.gate_up, self.down, self.gate_up_bias, self.down_bias if first else None)
        shared = record.shared_expert
        self.shared = Mlp(place, shared, prefix) if shared else None
        gate = f"{self.path}{self.names.shared_gate}.weight"
        self.shared_gate = place.gemm(place.empty_for(gate)) if record.shared_gate else None

    def _stack(self, place: Place, rows: list[int], columns: int) -> Part:
        names = [f"{self.path}experts.0.{name}" for name in (self.names.gate, self.names.up, self.names.down)]
        return place.matrix(names, rows, columns, self.record.experts)

    takes_fp8 = False
    """The router wants its input as it is; what the experts take is brought to FP8 behind it."""

    in_graphs = True

    def parts(self) -> Iterator[tuple[str, Part]]:
        names = self.names
        yield f"{self.path}{names.router}.weight", self.router.weight
        if self.router.bias is not None:
            yield f"{self.path}{names.router}.bias", self.router.bias
        if self.correction is not None:
            yield f"{self.path}{names.correction}", self.correction
        if self.table is not None:
            yield f"{self.path}{names.table}", self.table
        for expert in range(self.record.experts):
            yield from self._expert_parts(expert)
        if self.shared is not None:
            yield from self.shared.parts()
        if self.shared_gate is not None:
            yield f"{self.path}{names.shared_gate}.weight", self.shared_gate.weight

    def _expert_parts(self, expert: int) -> Iterator[tuple[str, Part]]:
        names, halves = (self.names.gate, self.names.up), [self.inner, self.inner]
        path = f"{self.path}experts.{expert}."
        for name, weight in zip(names, self.gate_up[expert].split(halves), strict=True):
            yield f"{path}{name}.weight", weight
        yield f"{path}{self.names.down}.weight", self.down[expert]
        if self.gate_up_bias is not None and self.down_bias is not None:
            for name, bias in zip(names, self.gate_up_bias[expert].split(halves), strict=True):
                yield f"{path}{name}.bias", bias
            yield f"{path}{self.names.down}.bias", self.down_bias[expert]

    def products(self) -> Iterator[Product]:
        if self.shared is not None:
            yield from self.shared.products()

    def lay_out(self) -> list[Tensor | Panels]:
        """Panels take the place of what was loaded. All that is multiplied and in none of the products."""
        held = self.held.in_panels()
        if held is not self.held:
            self.held = held
            del self.gate_up, self.down
        return held.matrices()

    def __call__(self, x: Tensor | Quantised, step: StepContext) -> Tensor:
        """This rank's part of a sum over ranks."""
        assert isinstance(x, Tensor)
        record = self.record
        told = self.table[step.tokens].long() if self.table is not None else None
        weights, experts = route(self.router(x.to(self.router.weight.dtype)), record.router, self.correction, told)
        if self.units is not None:
            return invariant_experts(
                x, self.held, weights, experts, record.activation, self.units, not self.alone, self._beside(x)
            )
        out = fused_experts(x, self.held, weights, experts, record.activation, record.router.weighs_input)
        if self.shared is None:
            return out
        shared = self.shared(x, step)
        return out + (shared if self.shared_gate is None else shared * torch.sigmoid(self.shared_gate(x)))

    def _beside(self, x: Tensor) -> Tensor | None:
        """The shared expert's units, under `invariant`."""
        if self.shared is None:
            return None
        sums = self.shared.unit_sums(x)
        return sums if self.shared_gate is None else sums * torch.sigmoid(self.shared_gate(x).float())


RECORD, PART = Moe, Experts
