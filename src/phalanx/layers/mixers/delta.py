"""Gated delta net: each rank has some of the key heads, with the value heads and the states that go with them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from phalanx.kernels.cache import zeros
from phalanx.kernels.delta import delta_net
from phalanx.kernels.delta_weights import CHUNK, DeltaWeights, PendingUpdates
from phalanx.kernels.fp8 import GROUP, Activations, Form, rows_in
from phalanx.kernels.gemm import Product
from phalanx.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, form_for
from phalanx.layers.place import Part, Place
from phalanx.layers.step import StepContext
from phalanx.spec.delta import DeltaNet, updates_beside

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _updates_kept(record: DeltaNet, device: torch.device) -> int:
    """A CPU keeps those that may be wrong; as many as a GPU where a state is rounded when it is written."""
    often = device.type == "cpu" and record.state_format == "fp32"
    return record.pending if often else updates_beside(max(1, record.pending))


class DeltaMixer:
    """Of a sequence it keeps a state and the convolution's last columns, whatever its length, in the sequence's place.

    A sequence that begins finds zeros, whatever is in its place. On a GPU, and where there may be drafts, what the last
    tokens do to the state is kept beside it.
    """

    in_graphs = True

    def __init__(self, place: Place, record: DeltaNet, prefix: str) -> None:
        self.record, self.path = record, f"{prefix}{record.module}."
        k_heads = len(place.shard.state_heads)
        self.v_heads = k_heads * (record.v_heads // record.k_heads)
        self.qkvz = ColumnParallelLinear(place, [f"{self.path}in_proj_{letter}" for letter in "qkvz"])
        self.rates = ColumnParallelLinear(place, [f"{self.path}in_proj_{letter}" for letter in "ba"])
        self.widths = self.qkvz.rows[:3]
        self.conv = place.empty(sum(self.widths), 1, record.kernel)
        self.decay = place.empty_for(self.path + "A_log")
        self.decay_bias = place.empty_for(self.path + "dt_bias")
        self.norm = place.empty_for(self.path + "norm.weight")
        self.output = RowParallelLinear(place, self.path + "out_proj")
        self.weights = DeltaWeights(
            k_heads, self.v_heads, record.k_dim, record.v_dim, self.conv[:, 0], self.decay, self.decay_bias, self.norm,
            place.spec.norm_eps,
        )  # fmt: skip
        self.columns = place.empty(0, record.ring, sum(self.widths))
        state, dtype = (self.v_heads, record.k_dim, record.v_dim), _DTYPES[record.state_format]
        self.memory = torch.empty(0, *state, dtype=dtype, device=place.device)
        self.pending: PendingUpdates | None = None
        if kept := _updates_kept(record, place.device):
            self.pending = PendingUpdates(
                torch.empty(0, kept, self.v_heads, record.k_dim + record.v_dim + 1, device=place.device),
                torch.empty(0, self.v_heads, record.v_dim, dtype=torch.int32, device=place.device),
                max(1, record.pending),
            )

    @property
    def takes(self) -> Form:
        return form_for(self.qkvz, self.rates)

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield from chain(self.qkvz.parts(), self.rates.parts())
        for letter, taps in zip("qkv", self.conv.split(self.widths), strict=True):
            yield f"{self.path}conv_{letter}.weight", taps
        yield f"{self.path}A_log", self.decay
        yield f"{self.path}dt_bias", self.decay_bias
        yield f"{self.path}norm.weight", self.norm
        yield from self.output.parts()

    def linears(self) -> Iterator[Linear]:
        yield from (self.qkvz, self.rates, self.output)

    def products(self) -> Iterator[Product]:
        yield from (linear.product for linear in self.linears())

    def block_bytes(self, block_size: int) -> int:
        return 0

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """Nothing that grows with a sequence is kept."""

    def working_bytes(self, tokens: int, rows: int) -> int:
        """In float32: what is made of all tokens, and a copy of the state of each sequence that decodes.

        A GPU makes less of them, and no copy.
        """
        channels, read = sum(self.widths), self.v_heads * self.record.v_dim
        if self.columns.is_cuda:
            of_chunks = self.v_heads * (CHUNK + 3) * 4
            return tokens * ((2 * channels + 3 * read + self.v_heads * CHUNK) * self.columns.element_size() + of_chunks)
        copied = 4 if self.memory.dtype == torch.float32 else 4 + self.memory.element_size()
        return 4 * tokens * (5 * channels + read) + copied * rows * read * self.record.k_dim

    def states(self) -> list[Tensor]:
        pending = [] if self.pending is None else [self.pending.updates, self.pending.since]
        return [self.memory, self.columns, *pending]

    def allocate_states(self, places: int) -> None:
        self.memory, self.columns, *pending = (zeros(state, places, *state.shape[1:]) for state in self.states())
        if self.pending is not None:
            updates, since = pending
            self.pending = PendingUpdates(updates, since, self.pending.most)

    def __call__(self, x: Activations, step: StepContext, rows: Tensor | None = None) -> Tensor:
        """This rank's part of what the net adds to these rows, all by default."""
        quantised = rows is None and self.output.product.takes_fp8 and self.record.v_dim == GROUP
        adapters = step.adapters_of(None)
        if rows_in(x) == 1:  # quick: the first weights of the other are on their way meanwhile
            rates, qkvz = self.rates(x, adapters), self.qkvz(x, adapters)
        else:  # not as quick: the other had better not wait for it
            qkvz, rates = self.qkvz(x, adapters), self.rates(x, adapters)
        mixed = delta_net(qkvz, rates, self.weights, self.memory, self.columns, step.batch, quantised, self.pending)
        if rows is not None:
            assert isinstance(mixed, Tensor)
            mixed = mixed.index_select(0, rows)
        return self.output(mixed, step.adapters_of(rows))


RECORD, PART = DeltaNet, DeltaMixer
