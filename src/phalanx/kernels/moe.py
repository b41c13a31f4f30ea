"""Routed experts."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.activation import gate_and_mul, sigmoid
from phalanx.kernels.four_bit import FourBitWeight
from phalanx.kernels.fp8 import E4M3, Activations, Fp8Weight, converts_e4m3, plain
from phalanx.kernels.gemm import Held
from phalanx.kernels.pairs import Unsummed, summed_torch
from phalanx.kernels.panels import Panels
from phalanx.kernels.panels import product as panel_product
from phalanx.spec.ffn import SILU, Activation, Router


def route(
    logits: Tensor,
    router: Router,
    correction: Tensor | None = None,
    told: Tensor | None = None,
    joined: bool = False,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights and numbers of each token's experts, which may be `told`.

    With `joined` the expert behind the others is everyone's last, by the sigmoid of its gate or by one.
    """
    if logits.is_cuda:
        from phalanx.kernels.gpu import route as gpu

        if gpu.routes(router, correction):
            return gpu.route(logits, router, correction, told, joined, gate)
    return route_torch(logits, router, correction, told, joined, gate)


def route_torch(
    logits: Tensor,
    router: Router,
    correction: Tensor | None = None,
    told: Tensor | None = None,
    joined: bool = False,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, in float32 but for a softmax over the chosen ones, which is in the logits' own dtype."""
    weights, experts = _routed(logits, router, correction, told)
    if not joined:
        return weights, experts
    last = weights.new_ones(len(logits), 1) if gate is None else sigmoid(gate.float()).to(weights.dtype)
    return torch.cat([weights, last], -1), F.pad(experts, (0, 1), value=router.experts)


def _routed(logits: Tensor, router: Router, correction: Tensor | None, told: Tensor | None) -> tuple[Tensor, Tensor]:
    if router.score == "chosen_softmax":
        best, experts = logits.topk(router.experts_per_token, dim=-1)
        return best.softmax(-1), experts
    scores = _scores(logits, router)
    if told is None:
        experts = _choice(logits, scores, router, correction).topk(router.experts_per_token, dim=-1).indices
    else:
        experts = told
    weights = scores.gather(-1, experts)
    if router.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return weights if router.scaling == 1.0 else weights * router.scaling, experts


def _scores(logits: Tensor, router: Router) -> Tensor:
    wide = logits.float()
    if router.score == "softmax":
        return wide.softmax(-1)
    return sigmoid(wide) if router.score == "sigmoid" else F.softplus(wide).sqrt()


def _choice(logits: Tensor, scores: Tensor, router: Router, correction: Tensor | None) -> Tensor:
    """What the best are chosen by: scores, with their correction, of the best groups alone."""
    if correction is None:
        return scores if router.score == "softmax" else logits
    choice = scores + correction
    if router.groups == 1:
        return choice
    grouped = choice.unflatten(-1, (router.groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best).scatter_(-1, best.topk(router.kept_groups, dim=-1).indices, 1.0)
    return grouped.masked_fill(kept[..., None] == 0, float("-inf")).flatten(-2)


class ExpertWeights(NamedTuple):
    """This rank's share of all experts: gate_up is [experts, 2 * inner, hidden], down [experts, hidden, inner].

    Of the down products' biases rank 0 has all and the others none, so that each counts once.
    """

    gate_up: Tensor | Held | PanelStack
    down: Tensor | Held | PanelStack
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def takes_fp8(self, dtype: torch.dtype) -> bool:
        """Whether a GPU brings what they take, numbers of this kind, to FP8."""
        weight = self.gate_up
        if not isinstance(weight, Fp8Weight) or not weight.values.is_cuda or not weight.numel():
            return False
        return dtype != torch.float32 and converts_e4m3(weight.values.device)

    def widened(self, dtype: torch.dtype) -> ExpertWeights:
        """All but what lies in panels."""
        gate_up, down = (
            weight if isinstance(weight, Tensor | PanelStack) else weight.dequantised(dtype)
            for weight in (self.gate_up, self.down)
        )
        return self._replace(gate_up=gate_up, down=down)

    def in_panels(self, units: int = 1) -> ExpertWeights:
        """With what is held as it is stored laid out in panels; itself where nothing is. `down` has so many units."""
        if isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor):
            return self
        gate_up, down = (
            weight if isinstance(weight, Tensor | PanelStack) else PanelStack.of(weight, count)
            for weight, count in ((self.gate_up, 1), (self.down, units))
        )
        return self._replace(gate_up=gate_up, down=down)

    def matrices(self) -> list[Tensor | Panels]:
        """Where they are multiplied from."""
        found: list[Tensor | Panels] = []
        for weight in (self.gate_up, self.down):
            found += (
                weight.matrices if isinstance(weight, PanelStack) else [weight] if isinstance(weight, Tensor) else []
            )
        return found


class PanelStack(NamedTuple):
    """Matrices of one shape, each in its panels."""

    matrices: tuple[Panels, ...]

    @classmethod
    def of(cls, stack: Held, units: int) -> PanelStack:
        return cls(tuple(replace(stack[index].panels(), units=units) for index in range(stack.shape[0])))

    def numel(self) -> int:
        return sum(matrix.numel() for matrix in self.matrices)


def fused_experts(
    x: Activations,
    held: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    activation: Activation = SILU,
    weighs_input: bool = False,
) -> Tensor:
    """sum over a token's experts of weight * down(gate(x) * up(x)), or, where that is meant, the same of weight * x.

    x is [tokens, hidden]; the result is a partial sum over ranks.
    """
    return summed(expert_pairs(x, held, weights, experts, activation, weighs_input))


def expert_pairs(
    x: Activations,
    held: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    activation: Activation = SILU,
    weighs_input: bool = False,
) -> Tensor | Unsummed:
    """The same, which on a GPU the next norm may sum up."""
    given = plain(x)
    if given.is_cuda and held.gate_up.numel():
        from phalanx.kernels.gpu import moe as gpu

        dtype = given.dtype
        taken = held if dtype != torch.float32 and _multiplied(held, given.device) else held.widened(dtype)
        gate_up, down = (taken.gate_up, taken.gate_up_bias), (taken.down, taken.down_bias)
        return gpu.expert_pairs(x, gate_up, down, weights.float(), experts.int(), activation, weighs_input)
    return fused_experts_torch(given, held.widened(given.dtype), weights, experts, activation, weighs_input)


def summed(given: Tensor | Unsummed, beside: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """What experts give, [tokens, hidden], and what a shared one gives beside them, by the sigmoid of its gate."""
    if isinstance(given, Unsummed) and given.rows.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        return gpu.sum_pairs(given, beside, gate)
    total = given if isinstance(given, Tensor) else summed_torch(given)
    return total if beside is None else total + (beside if gate is None else beside * sigmoid(gate))


def _multiplied(held: ExpertWeights, device: torch.device) -> bool:
    """Whether the GPU's kernels read these numbers."""
    matrices = (held.gate_up, held.down)
    has_e4m3 = any(isinstance(each, FourBitWeight) and each.scales.dtype == E4M3 for each in matrices)
    return not has_e4m3 or converts_e4m3(device)


def fused_experts_torch(
    x: Tensor, held: ExpertWeights, weights: Tensor, experts: Tensor, activation: Activation, weighs_input: bool
) -> Tensor:
    """The definition."""
    gate_up, down, gate_up_bias, down_bias = held
    out = torch.zeros_like(x)
    order = experts.flatten().argsort(stable=True)
    tokens = order // experts.shape[1]
    scales = weights.flatten()[order].to(x.dtype)[:, None]
    counts = torch.bincount(experts.flatten()).tolist()
    first = 0
    for expert, count in enumerate(counts):
        if count:
            mine = slice(first, first + count)
            taken = x[tokens[mine]] * scales[mine] if weighs_input else x[tokens[mine]]
            entered = _product(taken, gate_up, expert, None if gate_up_bias is None else gate_up_bias[expert])
            inner = gate_and_mul(entered, activation)
            given = _product(inner, down, expert, None if down_bias is None else down_bias[expert])
            out.index_add_(0, tokens[mine], given if weighs_input else given * scales[mine])
            first += count
    return out


def _product(x: Tensor, weights: Tensor | Held | PanelStack, expert: int, bias: Tensor | None) -> Tensor:
    if isinstance(weights, PanelStack):
        return panel_product(x, weights.matrices[expert], bias)
    assert isinstance(weights, Tensor)
    return F.linear(x, weights[expert], bias)
