"""Sums that come out with the same bits however they are dealt to ranks, and whoever shares the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.activation import gate_and_mul
from phalanx.kernels.attention import Sight, SightMasks, decode_attention
from phalanx.kernels.fp8 import Quantised
from phalanx.kernels.gemm import Gemm, Held, PanelGemm, skinny_gemm
from phalanx.kernels.moe import ExpertWeights, PanelStack
from phalanx.kernels.tiling import DecodeRows
from phalanx.spec.ffn import Activation

MOST_LEAVES = 8
PROGRAMS = 264
"""Programs that fill a large GPU."""
OUTPUTS_AT_ONCE = 128


def leaves_of(outputs: int, inputs: int) -> int:
    """Into how many leaves a GPU cuts an inner dimension that no rank shares: by the outputs of all ranks together."""
    leaves, tiles = MOST_LEAVES, -(-outputs // OUTPUTS_AT_ONCE)
    while leaves > 1 and (leaves * tiles > PROGRAMS or inputs % leaves):
        leaves //= 2
    return leaves


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """A power of two of them, neighbours first."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def join_ranks(gathered: Tensor, ranks: int, dtype: torch.dtype) -> Tensor:
    """The tree of all ranks' parts, which lie side by side in each row, rounded once."""
    if gathered.is_cuda:
        from phalanx.kernels.gpu import invariant as gpu

        return gpu.join_ranks(gathered, ranks, dtype)
    return tree_sum(gathered.chunk(ranks, 1)).to(dtype)


class InvariantGemm(Gemm):
    """The same bits for a row whatever rows are beside it, and, where the inner dimension is dealt to ranks in whole
    units, the same bits for the tree of all their sums, however many ranks there are. Of these units it has `units`.

    A part of a sum over ranks is `wide`, so that it is rounded once, behind the last sum.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, units: int = 1, wide: bool = False) -> None:
        super().__init__(weight, bias)
        self.units = units
        self._dtype = torch.float32 if wide else weight.dtype

    def pack(self) -> None:
        """There is one way to compute it."""

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        assert isinstance(x, Tensor)
        x = x.to(self.weight.dtype)
        if x.is_cuda:
            from phalanx.kernels.gpu import invariant as gpu

            return gpu.product(x, self.weight, self.bias, self.units, self._dtype)
        return skinny_gemm(x, self.weight, self.bias, self.units)

    def unit_sums(self, x: Tensor) -> Tensor:
        """What the tree is made of, [units, rows, outputs]."""
        if x.is_cuda:
            from phalanx.kernels.gpu import invariant as gpu

            return gpu.unit_sums(x, self.weight, self.bias, self.units)
        width = x.shape[1] // self.units
        cut = zip(x.split(width, 1), self.weight.split(width, 1), strict=True)
        return torch.stack(
            [skinny_gemm(own, columns, None if unit else self.bias) for unit, (own, columns) in enumerate(cut)]
        )


def product_torch(x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, dtype: torch.dtype) -> Tensor:
    """The definition: sums in float32, by leaves of the inner dimension, as a tree. The first leaf has the bias."""
    width = weight.shape[1] // leaves
    cut = zip(x.float().split(width, 1), weight.float().split(width, 1), strict=True)
    first = None if bias is None else bias.float()
    sums = [F.linear(own, columns, None if leaf else first) for leaf, (own, columns) in enumerate(cut)]
    return tree_sum(sums).to(dtype)


def invariant_attention(
    q: Tensor, cache: Tensor, rows: DecodeRows, masks: SightMasks, sight: Sight, scale: float
) -> Tensor:
    """`decode_attention` of rows that each stand alone: the tokens of prompts too, [rows, heads, head_dim]."""
    if q.is_cuda:
        from phalanx.kernels.gpu import invariant as gpu

        return gpu.attention(q, cache, rows, sight.window, sight.chunked, scale, sight.sinks)
    out = torch.empty(q.shape, dtype=q.dtype)
    decode_attention(q, cache, rows, masks, sight, scale, out)
    return out


def invariant_experts(
    x: Tensor,
    held: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    activation: Activation,
    units: int,
    wide: bool = False,
    beside: Tensor | None = None,
) -> Tensor:
    """`fused_experts`, unit by unit of the experts' inner dimension: each is summed over the experts of a token in
    one order, then with the unit of what always runs `beside` them, and of the units a tree is made.
    """
    gate_up, down = held.gate_up, held.down
    if x.is_cuda:
        from phalanx.kernels.gpu import invariant as gpu

        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        dtype = torch.float32 if wide else x.dtype
        return gpu.experts(x, gate_up, down, weights.float(), experts.int(), activation, units, dtype, beside)
    leaves = x.new_zeros(units, *x.shape)
    for expert in experts.unique().tolist():
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        entered = _of_expert(gate_up, expert, 1)(x[tokens])
        scales = weights[tokens, place].to(x.dtype)[:, None]
        given = _of_expert(down, expert, units).unit_sums(gate_and_mul(entered, activation))
        leaves.index_add_(1, tokens, given * scales)
    return tree_sum(list(leaves if beside is None else leaves + beside))


def _of_expert(stack: Tensor | Held | PanelStack, expert: int, units: int) -> InvariantGemm | PanelGemm:
    if isinstance(stack, PanelStack):
        return PanelGemm(stack.matrices[expert])
    assert isinstance(stack, Tensor)
    return InvariantGemm(stack[expert], units=units)
