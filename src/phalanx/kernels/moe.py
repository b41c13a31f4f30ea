"""Routed experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.activation import silu_and_mul
from phalanx.kernels.fp8 import Fp8Weight


def route(logits: Tensor, experts_per_token: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Weights and numbers of each token's experts: softmax over all, in float32, then the best."""
    if logits.is_cuda:
        from phalanx.kernels import gpu

        return gpu.route(logits, experts_per_token, renormalise)
    return route_torch(logits, experts_per_token, renormalise)


def route_torch(logits: Tensor, experts_per_token: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The definition."""
    weights, experts = torch.softmax(logits.float(), dim=-1).topk(experts_per_token, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def fused_experts(
    x: Tensor, gate_up: Tensor | Fp8Weight, down: Tensor | Fp8Weight, weights: Tensor, experts: Tensor
) -> Tensor:
    """sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    x is [tokens, hidden], gate_up [experts, 2 * inner, hidden], down [experts, hidden, inner], where inner is this
    rank's share: the result is a partial sum.
    """
    if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight) and (x.dtype == torch.float32 or not x.is_cuda):
        gate_up, down = gate_up.dequantised(x.dtype), down.dequantised(x.dtype)
    if x.is_cuda and gate_up.numel():
        from phalanx.kernels import gpu

        return gpu.fused_experts(x, gate_up, down, weights, experts)
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    return fused_experts_torch(x, gate_up, down, weights, experts)


def fused_experts_torch(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """The definition."""
    out = torch.zeros_like(x)
    order = experts.flatten().argsort(stable=True)
    tokens = order // experts.shape[1]
    scales = weights.flatten()[order].to(x.dtype)[:, None]
    counts = torch.bincount(experts.flatten(), minlength=gate_up.shape[0]).tolist()
    first = 0
    for expert, count in enumerate(counts):
        if count:
            mine = slice(first, first + count)
            inner = silu_and_mul(F.linear(x[tokens[mine]], gate_up[expert]))
            out.index_add_(0, tokens[mine], F.linear(inner, down[expert]) * scales[mine])
            first += count
    return out
