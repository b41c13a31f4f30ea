"""A router's product and the choice of experts in one launch, which may norm what both are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.fp8 import Activations, plain
from phalanx.kernels.moe import route_torch
from phalanx.kernels.norm import add_rms_norm_in
from phalanx.kernels.unnormed import Unnormed
from phalanx.spec.ffn import Router

MOST_ROWS = 64
"""Above these, the product and the choice are launched one after the other, and the norm before them."""


class Routed(NamedTuple):
    """What experts take, normed, and what `route` makes of the router's product with it."""

    x: Activations
    weights: Tensor
    experts: Tensor


class RouterAtOnce(NamedTuple):
    """Of few rows. A shared expert's gate, where there is one, is the last row of the weight.

    `blanks` are where scores are left for those who choose. There are so few that a program for each leaves room on
    the GPU for those it waits for.
    """

    weight: Tensor
    bias: Tensor | None
    router: Router
    correction: Tensor | None
    blanks: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, router: Router, correction: Tensor | None) -> RouterAtOnce | None:
        """None where there is no such kernel."""
        if weight.is_cuda:
            from phalanx.kernels.gpu import router as gpu

            if gpu.routes_at_once(weight, router, correction):
                most = min(MOST_ROWS, gpu.processors(weight.device) // 2)
                blanks = blanks_for(len(weight), weight.device, most)
                return cls(weight, bias, router, correction, blanks)
        return None

    def takes(self, rows: int) -> bool:
        """Whether one launch is the fastest way for so many."""
        from phalanx.kernels.gpu import router as gpu

        return rows * len(self.weight) <= len(self.blanks) and gpu.share_of(rows, self.weight) is not None

    def __call__(self, x: Activations | Unnormed, told: Tensor | None, joined: bool) -> Routed:
        if self.weight.is_cuda:
            from phalanx.kernels.gpu import router as gpu

            return Routed(*gpu.score_and_route(x, *self, told, joined))
        return score_and_route_torch(x, *self, told, joined)


def blanks_for(outputs: int, device: torch.device, rows: int = MOST_ROWS) -> Tensor:
    """For a layer of its own: kernels of two engines may run at the same time."""
    return torch.full((rows * outputs,), -1, dtype=torch.int32, device=device)


def score_and_route_torch(
    x: Activations | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    router: Router,
    correction: Tensor | None,
    blanks: Tensor,
    told: Tensor | None,
    joined: bool,
) -> Routed:
    """The definition."""
    if isinstance(x, Unnormed):
        x = add_rms_norm_in(x.form, x.x, x.kept.copy_(x.residual), x.weight, x.eps)
    logits, gate = F.linear(plain(x).to(weight.dtype), weight, bias).tensor_split([router.experts], -1)
    return Routed(x, *route_torch(logits, router, correction, told, joined, gate if gate.shape[1] else None))
