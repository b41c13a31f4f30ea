"""The choice of experts in one kernel, a warp for every token."""

from __future__ import annotations

from typing import Any

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
    """Of all experts, in every warp."""
    return tl.max(tl.max(x, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def numbers_of_experts(BLOCK: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """[WARPS, BLOCK / WIDTH, WIDTH]: every warp has all experts, so that none has to wait for what others find out, and
    with a WIDTH of 32 all but the last step of what is found out about them is within a thread.
    """
    expert = tl.arange(0, BLOCK // WIDTH)[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    return tl.broadcast_to(expert, (WARPS, BLOCK // WIDTH, WIDTH))


@triton.jit
def _scores(value, SCORE: tl.constexpr):
    """Of every expert; those of a softmax over the chosen ones are their logits."""
    if SCORE == "softmax":
        probability = tl.exp(value - _score_of(_largest(_ranked(value))))
        return probability / tl.sum(tl.sum(probability, 1, keep_dims=True), 2, keep_dims=True)
    if SCORE == "sigmoid":
        return 1 / (1 + tl.exp(-value))
    if SCORE == "sqrt_softplus":
        soft = tl.where(value > 20.0, value, tl.log(1 + tl.exp(tl.minimum(value, 20.0))))
        return tl.sqrt(soft)
    return value


@triton.jit
def _in_best_groups(rank, GROUPS: tl.constexpr, KEPT: tl.constexpr, EACH: tl.constexpr):
    """The ranks of experts that are of the groups whose two best are the best together; those of others are lowest."""
    group, member = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, EACH)[None, None, :]
    first = tl.max(rank, 2, keep_dims=True)
    where = tl.min(tl.where(rank == first, member, EACH), 2, keep_dims=True)
    second = tl.max(tl.where(member == where, LOWEST, rank), 2, keep_dims=True)
    left = _ranked(_score_of(first) + _score_of(second))
    kept = group < 0
    for _ in tl.static_range(KEPT):
        best = tl.min(tl.where(left == tl.max(left, 1, keep_dims=True), group, GROUPS), 1, keep_dims=True)
        kept = kept | (group == best)
        left = tl.where(group == best, LOWEST, left)
    return tl.where(kept, rank, LOWEST)


@triton.jit
def choose_and_store(
    value, expert, added, told, opening, weights, chosen, row, experts, scaling, DTYPE: tl.constexpr,
    SCORE: tl.constexpr, RENORMALISE: tl.constexpr, JOINED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TOP: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The best experts of one token, the first of equals first, or those it is told, and their weights.

    `value` is what the router says of each `expert`, numbers of DTYPE, and `added` their correction.
    """
    slot = tl.broadcast_to(tl.arange(0, SLOTS)[None, None, :], (WARPS, 1, SLOTS))
    known = expert < experts
    if told is not None:
        asked = tl.load(told + row * TOP + slot, mask=slot < TOP, other=0).to(tl.int32)
    score = _scores(value, SCORE)
    left = tl.where(known, _ranked(score if added is None else score + added), LOWEST)
    if GROUPS > 1:
        left = _in_best_groups(left, GROUPS, KEPT, WIDTH)
    best, where = tl.full([WARPS, 1, SLOTS], NOTHING, tl.float32), tl.zeros([WARPS, 1, SLOTS], tl.int32)
    for rank in tl.static_range(TOP):
        highest = _largest(left)
        if told is not None:
            index = tl.sum(tl.where(slot == rank, asked, 0), 2, keep_dims=True)
        else:
            index = tl.min(tl.min(tl.where(left == highest, expert, BLOCK), 1, keep_dims=True), 2, keep_dims=True)
        if told is not None or added is not None:
            highest = _largest(tl.where(expert == index, _ranked(score), LOWEST))
        best = tl.where(slot == rank, _score_of(highest), best)
        where = tl.where(slot == rank, index, where)
        left = tl.where(expert == index, LOWEST, left)
    if SCORE == "chosen_softmax":
        best = tl.exp(best - tl.max(best, 2, keep_dims=True))
        best = (best / tl.sum(best, 2, keep_dims=True)).to(DTYPE).to(tl.float32)
    else:
        if RENORMALISE:
            best /= tl.maximum(tl.sum(tl.where(slot < TOP, best, 0.0), 2, keep_dims=True), 1e-20)
        best *= scaling
    if JOINED:
        last = 1.0
        if opening is not None:
            last = 1 / (1 + tl.exp(-opening))
        best = tl.where(slot == TOP, last, best)
        where = tl.where(slot == TOP, experts, where)
    stored = (slot < TOP + JOINED) & (tl.arange(0, WARPS)[:, None, None] == 0)
    tl.store(weights + row * (TOP + JOINED) + slot, best, mask=stored)
    tl.store(chosen + row * (TOP + JOINED) + slot, where, mask=stored)


@triton.jit(do_not_specialize=["stride", "gate_stride"], do_not_specialize_on_alignment=_PLACES)
def _route(
    logits, correction, told, gate, weights, chosen, experts, stride, gate_stride, scaling, SCORE: tl.constexpr,
    RENORMALISE: tl.constexpr, JOINED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    expert = numbers_of_experts(BLOCK, WIDTH, 1)
    known = expert < experts
    added = None
    if correction is not None:
        added = tl.load(correction + expert, mask=known, other=0.0).to(tl.float32)
    wait_for_ahead()
    value = tl.load(logits + row * stride + expert, mask=known, other=NOTHING).to(tl.float32)
    opening = None
    if gate is not None:
        opening = tl.load(gate + row * gate_stride).to(tl.float32)
    choose_and_store(
        value, expert, added, told, opening, weights, chosen, row, experts, scaling, logits.dtype.element_ty, SCORE,
        RENORMALISE, JOINED, GROUPS, KEPT, TOP, SLOTS, BLOCK, WIDTH, 1,
    )  # fmt: skip


def routes(router: Router, correction: Tensor | None) -> bool:
    """Groups are reckoned with where there is a correction; they must be of a power of two."""
    in_groups = router.groups > 1 and correction is not None
    return not in_groups or (router.experts & (router.experts - 1) == 0 and router.groups & (router.groups - 1) == 0)


def way_to_choose(router: Router, correction: Tensor | None, told: Tensor | None, joined: bool) -> dict[str, Any]:
    """What kernels are built for."""
    top, block = router.experts_per_token, triton.next_power_of_2(router.experts)
    groups = router.groups if correction is not None and told is None else 1
    return {
        "SCORE": router.score,
        "RENORMALISE": router.renormalise,
        "JOINED": int(joined),
        "GROUPS": groups,
        "KEPT": router.kept_groups,
        "TOP": top,
        "SLOTS": max(LANES, triton.next_power_of_2(top + joined)),
        "BLOCK": block,
        "WIDTH": block // groups if groups > 1 else min(block, LANES),
    }


def empty_choice(rows: int, each: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for weights in float32, and for expert numbers as int32."""
    weights = torch.empty(rows, each, dtype=torch.float32, device=device)
    return weights, torch.empty(rows, each, dtype=torch.int32, device=device)


def route(
    logits: Tensor, router: Router, correction: Tensor | None, told: Tensor | None, joined: bool, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights in float32, and expert numbers as int32. Rows of logits may lie apart, with the gate between them."""
    rows, experts = logits.shape
    weights, chosen = empty_choice(rows, router.experts_per_token + joined, logits.device)
    _route[(rows,)](
        logits, correction, told, gate, weights, chosen, experts, logits.stride(0),
        0 if gate is None else gate.stride(0), router.scaling, **way_to_choose(router, correction, told, joined),
        num_warps=1, launch_pdl=starts_early(),
    )  # fmt: skip
    return weights, chosen
