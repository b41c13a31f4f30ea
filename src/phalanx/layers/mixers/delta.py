"""Gated delta net: each rank has some of the key heads, with the value heads and the states that go with them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.delta import DeltaRows, convolve, delta_rule, gated_norm, unit_length
from phalanx.kernels.fp8 import Quantised
from phalanx.kernels.gemm import Product
from phalanx.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.layers.place import Part, Place
from phalanx.layers.step import StepContext
from phalanx.spec.delta import DeltaNet


class DeltaMixer:
    """Of a sequence it keeps a state and the convolution's last columns, whatever its length, in the sequence's place.

    A sequence that begins finds zeros, whatever is in its place.
    """

    in_graphs = False
    takes_fp8 = False

    def __init__(self, place: Place, record: DeltaNet, prefix: str) -> None:
        self.record, self.path, self.dtype = record, f"{prefix}{record.module}.", place.dtype
        self.eps = place.spec.norm_eps
        self.shared = record.v_heads // record.k_heads
        self.v_heads = len(place.shard.state_heads) * self.shared
        self.qkvz = ColumnParallelLinear(place, [f"{self.path}in_proj_{letter}" for letter in "qkvz"])
        self.rates = ColumnParallelLinear(place, [f"{self.path}in_proj_{letter}" for letter in "ba"])
        self.widths = self.qkvz.rows[:3]
        self.conv = place.empty(sum(self.widths), 1, record.kernel)
        self.decay = place.empty_for(self.path + "A_log")
        self.decay_bias = place.empty_for(self.path + "dt_bias")
        self.norm = place.empty_for(self.path + "norm.weight")
        self.output = RowParallelLinear(place, self.path + "out_proj")
        self.columns = place.empty(0, record.kernel - 1, sum(self.widths))
        self.memory = torch.empty(0, self.v_heads, record.k_dim, record.v_dim, device=place.device)

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield from chain(self.qkvz.parts(), self.rates.parts())
        for letter, taps in zip("qkv", self.conv.split(self.widths), strict=True):
            yield f"{self.path}conv_{letter}.weight", taps
        yield f"{self.path}A_log", self.decay
        yield f"{self.path}dt_bias", self.decay_bias
        yield f"{self.path}norm.weight", self.norm
        yield from self.output.parts()

    def products(self) -> Iterator[Product]:
        yield from (self.qkvz.product, self.rates.product, self.output.product)

    def block_bytes(self, block_size: int) -> int:
        return 0

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """Nothing that grows with a sequence is kept."""

    def working_bytes(self, tokens: int, rows: int) -> int:
        """In float32: what is made of all tokens, and a copy of the state of each sequence that decodes."""
        record = self.record
        read = self.v_heads * record.v_dim
        return 4 * (tokens * (5 * sum(self.widths) + read) + rows * read * record.k_dim)

    def states(self) -> list[Tensor]:
        return [self.memory, self.columns]

    def allocate_states(self, places: int) -> None:
        self.memory = self.memory.new_zeros(places, *self.memory.shape[1:])
        self.columns = self.columns.new_zeros(places, *self.columns.shape[1:])

    def __call__(self, x: Tensor | Quantised, step: StepContext, rows: Tensor | None = None) -> Tensor:
        """This rank's part of what the net adds to these rows, all by default."""
        assert isinstance(x, Tensor)
        qkv, gate = self.qkvz(x).split([sum(self.widths), self.qkvz.rows[3]], -1)
        mixed = convolve(qkv, self.conv[:, 0].t().float(), self.columns, step.batch)
        read = delta_rule(self._rows(mixed, self.rates(x)), self.memory, step.batch)
        gate = gate.view(read.shape)
        if rows is not None:
            read, gate = read[rows], gate[rows]
        return self.output(gated_norm(read, gate, self.norm, self.eps, self.dtype).flatten(1))

    def _rows(self, mixed: Tensor, rates: Tensor) -> DeltaRows:
        """What the rule takes; value heads that share a key head each have a copy of its queries and keys."""
        record = self.record
        q, k, v = (part.unflatten(1, (-1, width)) for part, width in self._split(mixed))
        q, k = (unit_length(part).repeat_interleave(self.shared, 1) for part in (q, k))
        beta, slow = rates.chunk(2, -1)
        decay = -self.decay.exp() * F.softplus(slow.float() + self.decay_bias)
        return DeltaRows(q * record.k_dim**-0.5, k, v.float(), decay, beta.sigmoid().float())

    def _split(self, mixed: Tensor) -> Iterator[tuple[Tensor, int]]:
        yield from zip(
            mixed.split(self.widths, -1), (self.record.k_dim, self.record.k_dim, self.record.v_dim), strict=True
        )


RECORD, PART = DeltaNet, DeltaMixer
