"""The choice of experts and their sorting by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

from phalanx.kernels.fp8 import Form
from phalanx.kernels.gpu import gemm, route, router, rows, sort
from phalanx.kernels.moe import route_torch
from phalanx.kernels.router import blanks_for, score_and_route_torch
from phalanx.kernels.unnormed import Unnormed
from phalanx.spec.ffn import Router
from tests.kernels.interpreted_rows import flat
from tests.kernels.interpreter import make_ready

CPU = torch.device("cpu")
TILES = router.Share(8, 8, tiled=True)
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


def check_at_once(
    asked: Router, count: int, outputs: int, device: torch.device = CPU, dtype: torch.dtype = torch.float16
) -> None:
    """The product and the choice in one launch are those of two: sums of these numbers are exact in any order, and
    experts are often equal. Weights may differ in their last bit, as Triton 3.7 builds them. What waits for scores
    leaves blanks.
    """
    x, gated = torch.randint(-3, 4, (count, 130), device=device).to(dtype), outputs > asked.experts
    weight = (torch.randint(-8, 9, (outputs, 130), device=device) / 32).to(torch.float32 if asked.wide else dtype)
    bias = torch.randint(-8, 9, (outputs,), device=device).to(weight.dtype) if asked.bias else None
    correction = torch.randint(-40, -24, (asked.experts,), device=device) / 8 if asked.correction else None
    told = (
        torch.rand(count, asked.experts, device=device).topk(asked.experts_per_token).indices if asked.hashed else None
    )
    logits = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    scores, gate = logits.to(weight.dtype).split([asked.experts, outputs - asked.experts], -1)
    assert router.routes_at_once(weight, asked, correction)
    blanks = blanks_for(outputs, device)
    for joined in (False, True) if not gated else (True,):
        wanted = route.route(scores, asked, correction, told, joined, gate if gated else None)
        _, defined, _ = score_and_route_torch(x, weight, bias, asked, correction, blanks, told, joined)
        torch.testing.assert_close(wanted[0].sort().values, defined.float().sort().values, atol=1e-3, rtol=1e-3)
        for share in (router.Share(8, 1), router.Share(16, 3), *(() if asked.wide else (TILES,))):
            with patch.object(router, "share_of", lambda *_, share=share: share):
                _, *found = router.score_and_route(x, weight, bias, asked, correction, blanks, told, joined)
            assert torch.equal(found[1], wanted[1]), (asked, count, share)
            torch.testing.assert_close(found[0], wanted[0], atol=0.0, rtol=3e-7)
            assert blanks.eq(-1).all()


def check_normed(count: int, form: Form, share: router.Share, device: torch.device = CPU) -> None:
    """A norm in the same launch has the bits of one before, as have the stream and all that follows."""
    dtype = torch.float16 if device == CPU else torch.bfloat16  # the interpreter has no arithmetic of bfloat16
    x, residual = (torch.randn(count, 320, device=device).to(dtype) for _ in range(2))
    scale, weight = torch.randn(320, device=device), torch.randn(24, 320, device=device).to(dtype)
    kept, wanted, asked = residual.clone(), residual.clone(), Router(24, 4, renormalise=True)
    blanks, unnormed = blanks_for(24, device), Unnormed(x, residual, torch.empty_like(x), scale, 1e-5, form)
    normed = rows.add_rms_norm(x, wanted, scale, 1e-5, form)
    plain = rows.add_rms_norm(x, kept.clone(), scale, 1e-5)
    with patch.object(router, "share_of", lambda *_: share):
        found, *choice = router.score_and_route(unnormed, weight, None, asked, None, blanks, None, False)
        _, *meant = router.score_and_route(plain, weight, None, asked, None, blanks, None, False)
    assert torch.equal(residual, kept)
    assert torch.equal(unnormed.kept, wanted)
    assert all(torch.equal(*pair) for pair in zip(flat(found), flat(normed), strict=True))
    assert all(torch.equal(*pair) for pair in zip(choice, meant, strict=True))
    assert blanks.eq(-1).all()


def check_tiles(count: int, form: Form, bias: bool, device: torch.device = CPU) -> None:
    """Scores of tensor cores are multiplied by what the norm brings after they were summed up: rounded elsewhere."""
    dtype = torch.float16 if device == CPU else torch.bfloat16
    x, residual = (torch.randn(count, 320, device=device).to(dtype) for _ in range(2))
    scale, weight = torch.randn(320, device=device).to(dtype), torch.randn(25, 320, device=device).to(dtype) / 8
    added = torch.randn(25, device=device).to(dtype) if bias else None
    wanted, asked = residual.clone(), Router(25 if bias else 24, 4, "chosen_softmax", bias=bias)
    blanks, unnormed = blanks_for(25, device), Unnormed(x, residual, torch.empty_like(x), scale, 1e-5, form)
    normed = rows.add_rms_norm(x, wanted, scale, 1e-5, form)
    with patch.object(router, "share_of", lambda *_: TILES):
        found, weights, chosen = router.score_and_route(unnormed, weight, added, asked, None, blanks, None, not bias)
    assert torch.equal(unnormed.kept, wanted)
    near = {"atol": 1e-2, "rtol": 1e-2}
    for mine, theirs in zip(flat(found), flat(normed), strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=0.0, rtol=0.1)
    exact = wanted.double() * (wanted.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * scale.double()
    logits = exact @ weight.double().T + (0 if added is None else added.double())
    best = logits[:, : asked.experts].topk(4).values.softmax(1).float()
    torch.testing.assert_close(weights[:, :4], best, **near)
    if not bias:
        torch.testing.assert_close(weights[:, 4], logits[:, 24].sigmoid().float(), **near)
    taken = logits.gather(1, chosen[:, :4].long()).softmax(1).float()
    torch.testing.assert_close(taken, best, **near)
    assert blanks.eq(-1).all()


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
    check_placed(sort.apart(chosen, tile), chosen, tile)
    if tokens > 1:
        chosen[0] = chosen[0, 0]
        check_sorted(sort.sort_by_expert(chosen, experts, tile), chosen, experts, tile)


def check_placed(by_expert: sort.ByExpert, chosen: Tensor, tile: int) -> None:
    """Every pair lies once in a tile of its expert."""
    rows = by_expert.order.view(-1, tile)
    pairs = [
        (pair, expert) for row, expert in zip(rows.tolist(), by_expert.owner.tolist(), strict=True) for pair in row
    ]
    assert sorted((pair, expert) for pair, expert in pairs if pair != chosen.numel()) == list(
        enumerate(chosen.flatten().tolist())
    )


def check_sorted(by_expert: sort.ByExpert, chosen: Tensor, experts: int, tile: int) -> None:
    """An expert's tiles are no more than it needs; tiles without a pair are nobody's."""
    check_placed(by_expert, chosen, tile)
    order, owner = by_expert
    rows = order.view(-1, tile)
    assert owner[(rows == chosen.numel()).all(1)].eq(-1).all()
    needed = -(-chosen.flatten().bincount(minlength=experts) // tile)
    assert torch.equal(owner[owner >= 0].bincount(minlength=experts), needed)
    assert not gemm.counters(chosen.device).any()


def main() -> None:
    make_ready()
    torch.manual_seed(0)
    for asked in ROUTERS:
        for joined, gated in ((False, False), (True, False), (True, True)):
            check_route(asked, 9, joined, gated)
    for count in (1, 2, 33):
        check_route(ROUTERS[0], count, True, True)
    for number, asked in enumerate(ROUTERS):
        check_at_once(asked, 1 + number % 4, asked.experts + number % 2)
    check_at_once(Router(32, 4, "chosen_softmax", bias=True, wide=True), 8, 32)
    for count, form, share in zip(
        (1, 3, 2), Form, (router.Share(8, 1), router.Share(8, 2), router.Share(32, 1)), strict=True
    ):
        check_normed(count, form, share)
    for count, form, bias in zip((1, 9, 19), Form, (True, False, True), strict=True):
        check_tiles(count, form, bias)
    check_the_first_of_equals()
    for count in (1, 2, 5, 9, 33):
        check_wide(count, 6, 700)
        check_wide(count, 3, 5000)
    for few in (4096, 0):
        sort.FEW_PAIRS = few
        check_sort(33, 4, 60, 16)
        check_sort(70, 2, 5, 16)
    for tokens in (1, 2, 4):
        check_sort(tokens, 4, 64, 16)


if __name__ == "__main__":
    main()
