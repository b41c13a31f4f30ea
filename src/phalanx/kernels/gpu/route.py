"""The choice of experts in one kernel, a warp for every token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.spec.ffn import Router

NOTHING = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-(2**31))
"""Lower than the rank of any number."""

LANES = 32
"""Threads of a warp."""


_PLACES = ["correction", "told", "weights", "chosen"]
"""What is aligned Triton reads in fours and eights, and more would be found out between threads than within."""


@triton.jit
def _ranked(score):
    """Whole numbers in the order of these: a warp finds the largest of them in one instruction."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # of two zeros neither is the larger one
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of(rank):
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _largest(x):
    """Of all."""
    return tl.max(tl.max(x, 0, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _scores(value, SCORE: tl.constexpr):
    """Of every expert; those of a softmax over the chosen ones are their logits."""
    if SCORE == "softmax":
        probability = tl.exp(value - _score_of(_largest(_ranked(value))))
        return probability / tl.sum(tl.sum(probability, 0, keep_dims=True), 1, keep_dims=True)
    if SCORE == "sigmoid":
        return 1 / (1 + tl.exp(-value))
    if SCORE == "sqrt_softplus":
        soft = tl.where(value > 20.0, value, tl.log(1 + tl.exp(tl.minimum(value, 20.0))))
        return tl.sqrt(soft)
    return value


@triton.jit
def _in_best_groups(rank, GROUPS: tl.constexpr, KEPT: tl.constexpr, EACH: tl.constexpr):
    """The ranks of experts that are of the groups whose two best are the best together; those of others are lowest."""
    group, member = tl.arange(0, GROUPS)[:, None], tl.arange(0, EACH)[None, :]
    first = tl.max(rank, 1, keep_dims=True)
    where = tl.min(tl.where(rank == first, member, EACH), 1, keep_dims=True)
    second = tl.max(tl.where(member == where, LOWEST, rank), 1, keep_dims=True)
    left = _ranked(_score_of(first) + _score_of(second))
    kept = group < 0
    for _ in tl.static_range(KEPT):
        best = tl.min(tl.where(left == tl.max(left, 0, keep_dims=True), group, GROUPS), 0, keep_dims=True)
        kept = kept | (group == best)
        left = tl.where(group == best, LOWEST, left)
    return tl.where(kept, rank, LOWEST)


@triton.jit(do_not_specialize=["stride", "gate_stride"], do_not_specialize_on_alignment=_PLACES)
def _route(
    logits, correction, told, gate, weights, chosen, experts, stride, gate_stride, scaling, SCORE: tl.constexpr,
    CORRECTED: tl.constexpr, TOLD: tl.constexpr, RENORMALISE: tl.constexpr, JOINED: tl.constexpr, GATED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The best experts of one token, the first of equals first, or those it is told, and their weights.

    Experts lie in the order [BLOCK / WIDTH, WIDTH], so that with a WIDTH of 32 all but the last step of what is found
    out about them is within a thread.
    """
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    known = expert < experts
    if CORRECTED:
        added = tl.load(correction + expert, mask=known, other=0.0).to(tl.float32)
    wait_for_ahead()
    value = tl.load(logits + row * stride + expert, mask=known, other=NOTHING).to(tl.float32)
    if TOLD:
        asked = tl.load(told + row * TOP + slot, mask=slot < TOP, other=0).to(tl.int32)
    if GATED:
        opening = tl.load(gate + row * gate_stride).to(tl.float32)
    score = _scores(value, SCORE)
    left = tl.where(known, _ranked(score + added if CORRECTED else score), LOWEST)
    if GROUPS > 1:
        left = _in_best_groups(left, GROUPS, KEPT, WIDTH)
    best, where = tl.full([1, SLOTS], NOTHING, tl.float32), tl.zeros([1, SLOTS], tl.int32)
    for rank in tl.static_range(TOP):
        highest = _largest(left)
        if TOLD:
            index = tl.sum(tl.where(slot == rank, asked, 0), 1, keep_dims=True)
        else:
            index = tl.min(tl.min(tl.where(left == highest, expert, BLOCK), 0, keep_dims=True), 1, keep_dims=True)
        if TOLD or CORRECTED:
            highest = _largest(tl.where(expert == index, _ranked(score), LOWEST))
        best = tl.where(slot == rank, _score_of(highest), best)
        where = tl.where(slot == rank, index, where)
        left = tl.where(expert == index, LOWEST, left)
    if SCORE == "chosen_softmax":
        best = tl.exp(best - tl.max(best, 1, keep_dims=True))
        best = (best / tl.sum(best, 1, keep_dims=True)).to(logits.dtype.element_ty).to(tl.float32)
    else:
        if RENORMALISE:
            best /= tl.maximum(tl.sum(tl.where(slot < TOP, best, 0.0), 1, keep_dims=True), 1e-20)
        best *= scaling
    if JOINED:
        last = 1.0
        if GATED:
            last = 1 / (1 + tl.exp(-opening))
        best = tl.where(slot == TOP, last, best)
        where = tl.where(slot == TOP, experts, where)
    tl.store(weights + row * (TOP + JOINED) + slot, best, mask=slot < TOP + JOINED)
    tl.store(chosen + row * (TOP + JOINED) + slot, where, mask=slot < TOP + JOINED)


def routes(router: Router, correction: Tensor | None) -> bool:
    """Groups are reckoned with where there is a correction; they must be of a power of two."""
    in_groups = router.groups > 1 and correction is not None
    return not in_groups or (router.experts & (router.experts - 1) == 0 and router.groups & (router.groups - 1) == 0)


def route(
    logits: Tensor, router: Router, correction: Tensor | None, told: Tensor | None, joined: bool, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights in float32, and expert numbers as int32. Rows of logits may lie apart, with the gate between them."""
    (rows, experts), top, device = logits.shape, router.experts_per_token, logits.device
    each, block = top + joined, triton.next_power_of_2(experts)
    weights = torch.empty(rows, each, dtype=torch.float32, device=device)
    chosen = torch.empty(rows, each, dtype=torch.int32, device=device)
    groups = router.groups if correction is not None and told is None else 1
    _route[(rows,)](
        logits, correction, told, gate, weights, chosen, experts, logits.stride(0),
        0 if gate is None else gate.stride(0), router.scaling, SCORE=router.score, CORRECTED=correction is not None,
        TOLD=told is not None, RENORMALISE=router.renormalise, JOINED=int(joined), GATED=gate is not None,
        GROUPS=groups, KEPT=router.kept_groups, TOP=top, SLOTS=max(LANES, triton.next_power_of_2(each)), BLOCK=block,
        WIDTH=block // groups if groups > 1 else min(block, LANES), num_warps=1, launch_pdl=starts_early(),
    )  # fmt: skip
    return weights, chosen
