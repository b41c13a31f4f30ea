"""Place: where a layer is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

import torch
from torch import Tensor

from phalanx.fabric.group import Group
from phalanx.kernels.fp8 import E4M3
from phalanx.kernels.gemm import Gemm, Held, PanelGemm, Product
from phalanx.kernels.invariant import InvariantGemm, leaves_of
from phalanx.kernels.panels import BLOCK
from phalanx.quant import at_work
from phalanx.quant.base import GpuScheme, SchemeAtWork
from phalanx.spec import Layout, ModelSpec, Scheme, Shard
from phalanx.spec.tensors import Tensor as TensorSpec

Part = Tensor | Held
"""The memory that this rank's share of a checkpoint tensor goes to."""


@dataclass(frozen=True)
class Place:
    """Which rank's share of which model, talking to whom, in which dtype on which device.

    `quantised` says whether quantised weights stay so; otherwise they are widened when they are loaded. `in_panels`:
    it is a CPU that multiplies those it can. `stored` has the formats of matrices that the configuration does not tell
    of. `fp8_cache` is for keys and values, which otherwise have the dtype of all. With `units` products are invariant:
    of the units that the inner dimension of a row-parallel one is cut into, this rank has so many.
    """

    layout: Layout
    group: Group
    dtype: torch.dtype
    device: torch.device
    quantised: bool = False
    fp8_cache: bool = False
    units: int | None = None
    in_panels: bool = False
    stored: Mapping[str, Scheme] = field(default_factory=dict)

    @property
    def spec(self) -> ModelSpec:
        return self.layout.spec

    @property
    def shard(self) -> Shard:
        return self.layout.shards[self.group.rank]

    def share_of(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's share of a checkpoint tensor."""
        return self.layout.shape(self.spec.tensors[name], self.group.rank)

    def kept(self, names: Sequence[str]) -> SchemeAtWork | None:
        """The format in which all of these checkpoint matrices are held as they are stored; None: they are widened."""
        tensors = [self.spec.tensors[f"{name}.weight"] for name in names]
        schemes = {self.scheme_of(tensor) for tensor in tensors} if self.quantised else {None}
        scheme = schemes.pop()
        if scheme is None or schemes:
            return None
        found, unit = at_work(scheme), scheme.format.unit or 1
        columns = [self.layout.slices(tensor, self.group.rank)[1] for tensor in tensors]
        whole = all(part.start % unit == 0 or part.start == part.stop for part in columns)
        return found if whole and self._multiplies(found) else None

    def _multiplies(self, found: SchemeAtWork) -> bool:
        """Whether this device does so with weights as they are stored."""
        if not self.in_panels:
            return found.keeps
        return found.in_panels and (found.in_one_order or self.units is None)

    @property
    def held_together(self) -> dict[str, int]:
        """How many columns no unit may part, of each matrix that ranks share by columns and that stays as it is stored
        though products are invariant.
        """
        shared = (tensor for tensor in self.spec.tensors.values() if tensor.split is not None and tensor.axis == 1)
        schemes = ((tensor.name, self.scheme_of(tensor)) for tensor in shared if self.in_panels)
        return {
            name: lcm(BLOCK, scheme.format.unit or 1)
            for name, scheme in schemes
            if scheme is not None and at_work(scheme).in_one_order
        }

    def scheme_of(self, tensor: TensorSpec) -> Scheme | None:
        """In which the checkpoint keeps a matrix; None: in plain numbers."""
        quantization = self.spec.quantization
        if quantization is not None and self.spec.is_quantised(tensor):
            return quantization.scheme_for(tensor.expert)
        return self.stored.get(tensor.name)

    def matrix(self, names: Sequence[str], rows: list[int], columns: int) -> Part:
        """Memory for these checkpoint matrices, one below the other."""
        return self.empty_matrix(self.kept(names), rows, columns)

    def empty_matrix(self, kept: SchemeAtWork | None, rows: list[int], columns: int, *stack: int) -> Part:
        """Memory for matrices of these heights, one below the other, in this format."""
        return self.empty(*stack, sum(rows), columns) if kept is None else kept.empty(stack, rows, columns, self.device)

    def gemm(self, weight: Tensor, bias: Tensor | None = None, outputs: int | None = None) -> Gemm:
        """A product that this rank computes whole, of so many outputs on all ranks together."""
        if self.units is None:
            return Gemm(weight, bias)
        on_gpu = self.device.type == "cuda"
        return InvariantGemm(weight, bias, leaves_of(outputs or len(weight), weight.shape[1]) if on_gpu else 1)

    def part_of_sum(self, weight: Tensor, bias: Tensor | None) -> Gemm:
        """A product that gives this rank's part of a sum over ranks."""
        if self.units is None:
            return Gemm(weight, bias)
        return InvariantGemm(weight, bias, self.units, wide=self.group.size > 1)

    def product(
        self, names: Sequence[str], rows: list[int], columns: int, bias: Tensor | None, summed: bool = False
    ) -> Product:
        """`summed`: its results are parts of a sum over ranks."""
        kept = self.kept(names)
        weight = self.empty_matrix(kept, rows, columns)
        if kept is None:
            assert isinstance(weight, Tensor)
            outputs = sum(self.spec.tensors[f"{name}.weight"].shape[0] for name in names)
            return self.part_of_sum(weight, bias) if summed else self.gemm(weight, bias, outputs)
        assert not isinstance(weight, Tensor)
        if self.in_panels:
            return PanelGemm(weight, bias, (self.units or 1) if summed else 1)
        assert isinstance(kept, GpuScheme)
        return kept.product(weight, bias, self.dtype)

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
