"""Sums that come out with the same bits however they are dealt to ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.kernels.activation import gate_and_mul
from phalanx.kernels.gemm import skinny_gemm
from phalanx.kernels.moe import ExpertWeights
from phalanx.spec.ffn import Activation


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """A power of two of them, neighbours first."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def invariant_experts(
    x: Tensor, held: ExpertWeights, weights: Tensor, experts: Tensor, activation: Activation, units: int
) -> Tensor:
    """`fused_experts`, unit by unit of the experts' inner dimension: each is summed over the experts of a token in
    their order, and of the units a tree is made.
    """
    gate_up, down = held.gate_up, held.down
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    leaves = x.new_zeros(units, *x.shape)
    width = down.shape[2] // units
    for expert in experts.unique().tolist():
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        inner = gate_and_mul(skinny_gemm(x[tokens], gate_up[expert], None), activation)
        scales = weights[tokens, place].to(x.dtype)[:, None]
        for unit, columns in enumerate(inner.split(width, 1)):
            given = skinny_gemm(columns, down[expert, :, unit * width : (unit + 1) * width], None)
            leaves[unit].index_add_(0, tokens, given * scales)
    return tree_sum(list(leaves))
