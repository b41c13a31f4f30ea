"""The choice of experts and their sorting by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from phalanx.kernels.gpu import gemm, moe, route
from phalanx.kernels.moe import route_torch
from phalanx.spec.ffn import Router
from tests.kernels.interpreter import make_ready

ROUTERS = (
    Router(60, 4),
    Router(128, 8, renormalise=True),
    Router(32, 4, "chosen_softmax"),
    Router(16, 1, "sigmoid"),
    Router(64, 4, "sigmoid", renormalise=True, scaling=1.8, correction=True),
    Router(64, 8, "sigmoid", renormalise=True, scaling=2.5, groups=8, kept_groups=4, correction=True),
    Router(48, 6, "sqrt_softplus", renormalise=True, scaling=1.5, correction=True),
    Router(48, 6, "sqrt_softplus", renormalise=True, scaling=1.5, hashed=7),
)


def check_route(router: Router, joined: bool, gated: bool) -> None:
    logits, gate = (torch.randn(9, router.experts + 1) * 3).split([router.experts, 1], -1)
    correction = torch.randn(router.experts) if router.correction else None
    told = torch.stack([torch.randperm(router.experts)[: router.experts_per_token] for _ in logits])
    told = told if router.hashed else None
    gate = gate if gated else None
    assert route.routes(router, correction)
    weights, chosen = route.route(logits, router, correction, told, joined, gate)
    wanted, best = route_torch(logits, router, correction, told, joined, gate)
    torch.testing.assert_close(chosen.long(), best)
    torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-5)


def check_wide(rows: int, outputs: int, inputs: int) -> None:
    """A router in float32, of rows in half precision."""
    x, weight, bias = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs), torch.randn(outputs)
    for held in (None, bias):
        logits = gemm.product(x, weight, held)
        torch.testing.assert_close(logits, torch.nn.functional.linear(x.float(), weight, held), atol=1e-4, rtol=1e-5)


def check_sort(tokens: int, top: int, experts: int, tile: int) -> None:
    """Every pair lies once in a tile of its expert, whichever way is taken; tiles without one are nobody's."""
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)]).int()
    order, owner = moe.sort_by_expert(chosen, experts, tile)
    rows = order.view(-1, tile)
    pairs = [(pair, expert) for row, expert in zip(rows.tolist(), owner.tolist(), strict=True) for pair in row]
    assert sorted((pair, expert) for pair, expert in pairs if pair < chosen.numel()) == list(
        enumerate(chosen.flatten().tolist())
    )
    assert owner[(rows >= chosen.numel()).all(1)].eq(-1).all()


def main() -> None:
    make_ready()
    torch.manual_seed(0)
    for router in ROUTERS:
        for joined, gated in ((False, False), (True, False), (True, True)):
            check_route(router, joined, gated)
    for rows in (1, 2, 5, 9, 33):
        check_wide(rows, 6, 700)
        check_wide(rows, 3, 5000)
    for few in (moe.FEW_PAIRS, 0):
        moe.FEW_PAIRS = few
        check_sort(33, 4, 60, 16)
        check_sort(70, 2, 5, 16)
    for tokens in (1, 2, 4):
        check_sort(tokens, 4, 64, 16)


if __name__ == "__main__":
    main()
