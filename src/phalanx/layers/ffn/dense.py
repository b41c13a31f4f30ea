"""A gated MLP: each rank holds some of its inner columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor

from phalanx.kernels.activation import gate_and_mul, gate_and_mul_quantised
from phalanx.kernels.fp8 import Activations, Form
from phalanx.kernels.gemm import PanelGemm, Product
from phalanx.kernels.invariant import InvariantGemm
from phalanx.kernels.panels import Panels
from phalanx.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, form_for
from phalanx.layers.place import Part, Place
from phalanx.layers.step import StepContext
from phalanx.spec.ffn import Dense


class Mlp:
    in_graphs = True

    def __init__(self, place: Place, record: Dense, prefix: str) -> None:
        path = f"{prefix}{record.module}."
        self.activation = record.activation
        self.gate_up = ColumnParallelLinear(place, [path + "gate_proj", path + "up_proj"])
        self.down = RowParallelLinear(place, path + "down_proj")

    def move_to(self, gate_up: Part, down: Part) -> None:
        """Lie there from now on. Nothing is loaded yet."""
        self.gate_up.product.weight, self.down.product.weight = gate_up, down

    @property
    def takes(self) -> Form:
        return form_for(self.gate_up)

    def parts(self) -> Iterator[tuple[str, Part]]:
        return chain(self.gate_up.parts(), self.down.parts())

    def linears(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)

    def products(self) -> Iterator[Product]:
        yield from (self.gate_up.product, self.down.product)

    def lay_out(self) -> list[Tensor | Panels]:
        """All is in its products."""
        return []

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        """This rank's part of a sum over ranks."""
        adapters = step.adapters_of(step.rows)
        entered = self.gate_up(x, adapters)
        gated = gate_and_mul_quantised if self.down.product.takes_fp8 else gate_and_mul
        return self.down(gated(entered, self.activation), adapters)

    def unit_sums(self, x: Tensor) -> Tensor:
        """This rank's part of that sum, unit by unit, under `invariant`."""
        assert isinstance(self.down.product, InvariantGemm | PanelGemm)
        return self.down.product.unit_sums(gate_and_mul(self.gate_up(x), self.activation))


RECORD, PART = Dense, Mlp
