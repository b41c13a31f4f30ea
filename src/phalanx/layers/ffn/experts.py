"""Routed experts. Every rank holds a slice of each expert's inner dimension and routes alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from phalanx.kernels.activation import sigmoid
from phalanx.kernels.fp8 import Activations, Form, plain
from phalanx.kernels.gemm import Gemm, Product
from phalanx.kernels.invariant import invariant_experts
from phalanx.kernels.moe import ExpertWeights, expert_pairs, fused_experts, route, summed
from phalanx.kernels.pairs import Unsummed
from phalanx.kernels.panels import Panels
from phalanx.kernels.router import Routed, RouterAtOnce
from phalanx.kernels.unnormed import Unnormed
from phalanx.layers.ffn.dense import Mlp
from phalanx.layers.place import Part, Place
from phalanx.layers.step import StepContext
from phalanx.spec.ffn import Moe

JOINED_ROWS = 128
"""Up to these a shared expert goes with the routed ones where it can: what counts there is the number of kernels."""


class Experts:
    """A shared expert of the size and format of the routed ones lies behind them in their stacks, and its gate behind
    the router, so that few rows can take it as one more of theirs. Many have products of its own, from there.
    """

    def __init__(self, place: Place, record: Moe, prefix: str) -> None:
        self.record, self.names = record, record.names
        self.path = f"{prefix}{record.names.block}."
        self.inner = len(place.shard.expert_ffn)
        hidden, first = place.spec.hidden, place.group.rank == 0
        self.units, self.alone, self.dtype = place.units, place.group.size == 1, place.dtype
        matrices = product(range(record.experts), (self.names.gate, self.names.up, self.names.down))
        self.kept = place.kept([f"{self.path}experts.{expert}.{name}" for expert, name in matrices])
        self.joins = self._joins(place)
        correction = f"{self.path}{self.names.correction}"
        self.correction = place.empty_for(correction) if record.router.correction else None
        self._build_router(place)
        self.table = place.empty_for(f"{self.path}{self.names.table}") if record.router.hashed else None
        self.gate_up = self._stack(place, [self.inner, self.inner], hidden)
        self.down = self._stack(place, [hidden], self.inner)
        self.gate_up_bias = place.empty(record.experts, 2 * self.inner) if record.bias else None
        self.down_bias = place.empty(record.experts, hidden) if record.bias else None
        self.held = ExpertWeights(self.gate_up, self.down, self.gate_up_bias, self.down_bias if first else None)
        shared = record.shared_expert
        self.shared = Mlp(place, shared, prefix) if shared else None
        if self.shared is not None and self.joins:
            self.shared.move_to(self.gate_up[record.experts], self.down[record.experts])

    def _joins(self, place: Place) -> bool:
        if not self.record.shared or place.units is not None:
            return False
        gate, up, down = (f"{self.path}{self.names.shared}.{name}_proj" for name in ("gate", "up", "down"))
        ways = {kept.scheme if kept else None for kept in (self.kept, place.kept([gate, up]), place.kept([down]))}
        in_panels = place.in_panels and self.kept is not None
        return len(ways) == 1 and not in_panels and place.shard.shared_ffn == place.shard.expert_ffn

    def _build_router(self, place: Place) -> None:
        router, gate = (f"{self.path}{name}." for name in (self.names.router, self.names.shared_gate))
        bias = place.empty_for(router + "bias") if self.record.router.bias else None
        weight, gate_weight = place.empty_for(router + "weight"), None
        self.router_and_gate: Gemm | None = None
        if self.record.shared_gate:
            gate_weight = place.empty_for(gate + "weight")
            if self.joins and bias is None and weight.dtype == gate_weight.dtype:
                both = torch.cat([weight, gate_weight])
                weight, gate_weight = both.split([len(weight), 1])
                self.router_and_gate = place.gemm(both)
        self.router = place.gemm(weight, bias)
        self.shared_gate = None if gate_weight is None else place.gemm(gate_weight)
        asked = self.router_and_gate or (self.router if self.shared_gate is None else None)
        self.at_once: RouterAtOnce | None = None
        if asked is not None and place.units is None:
            self.at_once = RouterAtOnce.of(asked.weight, asked.bias, self.record.router, self.correction)

    def _stack(self, place: Place, rows: list[int], columns: int) -> Part:
        return place.empty_matrix(self.kept, rows, columns, self.record.experts + self.joins)

    in_graphs = True

    @property
    def takes(self) -> Form:
        """The router wants its input as it is, whatever experts multiply."""
        routed = self.held.takes_fp8(self.dtype) and not self.record.router.weighs_input
        shared = self.shared is not None and self.shared.takes is Form.FP8
        return Form.BOTH if self.units is None and (routed or shared) else Form.PLAIN

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
        held = self.held.in_panels(self.units or 1)
        if held is not self.held:
            self.held = held
            del self.gate_up, self.down
        return held.matrices()

    def norms(self, rows: int) -> bool:
        """Whether so many may come unnormed."""
        return self.at_once is not None and self.at_once.takes(rows)

    def __call__(self, x: Activations | Unnormed, step: StepContext) -> Tensor | Unsummed:
        """This rank's part of a sum over ranks. One alone may leave it to the next norm to sum up experts."""
        record, rows = self.record, _rows_of(x)
        told = self.table[step.tokens].long() if self.table is not None else None
        joined = self.joins and rows <= JOINED_ROWS
        (x, weights, experts), gate = self.choose(x, told, joined)
        if self.units is not None:
            given = plain(x)
            beside = self._beside(given, gate)
            return invariant_experts(
                given, self.held, weights, experts, record.activation, self.units, not self.alone, beside
            )
        asked = (x, self.held, weights, experts, record.activation, record.router.weighs_input)
        if self.shared is None or joined:
            return expert_pairs(*asked) if self.alone else fused_experts(*asked)
        beside = self.shared(x, step)
        return summed(expert_pairs(*asked), beside, gate)

    def choose(self, x: Activations | Unnormed, told: Tensor | None, joined: bool) -> tuple[Routed, Tensor | None]:
        """x, normed, and its experts; apart from these, what the gate says of a shared expert that is none of them."""
        if self.at_once is not None and self.at_once.takes(_rows_of(x)):
            return self.at_once(x, told, joined), None
        assert not isinstance(x, Unnormed)
        logits, gate = self._scored(plain(x))
        return Routed(x, *route(logits, self.record.router, self.correction, told, joined, gate)), gate

    def _scored(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the router and the shared expert's gate say."""
        if self.router_and_gate is not None and len(x) <= JOINED_ROWS:
            logits, gate = self.router_and_gate(x).split([self.record.experts, 1], -1)
            return logits, gate
        return self.router(x), None if self.shared_gate is None else self.shared_gate(x)

    def _beside(self, x: Tensor, gate: Tensor | None) -> Tensor | None:
        """The shared expert's units, under `invariant`."""
        if self.shared is None:
            return None
        sums = self.shared.unit_sums(x)
        return sums if gate is None else sums * sigmoid(gate.float())


def _rows_of(x: Activations | Unnormed) -> int:
    return len(x.x if isinstance(x, Unnormed) else plain(x))


RECORD, PART = Moe, Experts
