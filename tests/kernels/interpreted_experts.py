"""The choice of experts and their sorting by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.gpu import gemm, route, sort
from phalanx.kernels.moe import route_torch
from phalanx.spec.ffn import Router
from tests.kernels.interpreter import make_ready

CPU = torch.device("cpu")
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


def check_route(router: Router, rows: int, joined: bool, gated: bool, device: torch.device = CPU) -> None:
    """Of scores that lie apart, so that rounding does not decide between them, and that are negative if corrected."""
    scores = torch.rand(rows, router.experts, device=device).argsort(1) / router.experts * 8 - 3.7
    logits, gate = torch.cat([scores, torch.randn(rows, 1, device=device)], 1).split([router.experts, 1], -1)
    correction = torch.randint(-40, -24, (router.experts,), device=device) / 8 if router.correction else None
    told = torch.rand(logits.shape, device=device).topk(router.experts_per_token).indices if router.hashed else None
    gate = gate if gated else None
    assert route.routes(router, correction)
    weights, chosen = route.route(logits, router, correction, told, joined, gate)
    wanted, best = route_torch(logits, router, correction, told, joined, gate)
    torch.testing.assert_close(chosen.long(), best)
    torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-5)
    for tile in (16, 64):
        check_sorted(sort.sort_by_expert(chosen, router.experts + joined, tile), chosen, router.experts + joined, tile)


def check_the_first_of_equals() -> None:
    """Also of a zero and a negative one."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 1.0], [-0.0, 0.0, -1.0, -0.0, 0.0]])
    _, chosen = route.route(logits, Router(5, 3, "chosen_softmax"), None, None, False, None)
    assert chosen.tolist() == [[1, 2, 0], [0, 1, 3]]


def check_wide(rows: int, outputs: int, inputs: int) -> None:
    """A router in float32, of rows in half precision."""
    x, weight, bias = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs), torch.randn(outputs)
    for held in (None, bias):
        logits = gemm.product(x, weight, held)
        torch.testing.assert_close(logits, torch.nn.functional.linear(x.float(), weight, held), atol=1e-4, rtol=1e-5)


def check_sort(tokens: int, top: int, experts: int, tile: int) -> None:
    """Whichever way is taken. The experts of a token may be the same."""
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)]).int()
    check_sorted(sort.sort_by_expert(chosen, experts, tile), chosen, experts, tile)
    if tokens > 1:
        chosen[0] = chosen[0, 0]
        check_sorted(sort.sort_by_expert(chosen, experts, tile), chosen, experts, tile)


def check_sorted(by_expert: sort.ByExpert, chosen: Tensor, experts: int, tile: int) -> None:
    """Every pair lies once in a tile of its expert, which are no more than it needs; tiles without one are nobody's."""
    order, owner = by_expert
    rows = order.view(-1, tile)
    pairs = [(pair, expert) for row, expert in zip(rows.tolist(), owner.tolist(), strict=True) for pair in row]
    assert sorted((pair, expert) for pair, expert in pairs if pair != chosen.numel()) == list(
        enumerate(chosen.flatten().tolist())
    )
    assert owner[(rows == chosen.numel()).all(1)].eq(-1).all()
    needed = -(-chosen.flatten().bincount(minlength=experts) // tile)
    assert torch.equal(owner[owner >= 0].bincount(minlength=experts), needed)
    assert not gemm.counters(chosen.device).any()


def main() -> None:
    make_ready()
    torch.manual_seed(0)
    for router in ROUTERS:
        for joined, gated in ((False, False), (True, False), (True, True)):
            check_route(router, 9, joined, gated)
    for rows in (1, 2, 33):
        check_route(ROUTERS[0], rows, True, True)
    check_the_first_of_equals()
    for rows in (1, 2, 5, 9, 33):
        check_wide(rows, 6, 700)
        check_wide(rows, 3, 5000)
    for few in (4096, 0):
        sort.FEW_PAIRS = few
        check_sort(33, 4, 60, 16)
        check_sort(70, 2, 5, 16)
    for tokens in (1, 2, 4):
        check_sort(tokens, 4, 64, 16)


if __name__ == "__main__":
    main()
