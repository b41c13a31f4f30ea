"""The choice of experts in one kernel, a program for every token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.spec.ffn import Router

NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _scores(value, known, SCORE: tl.constexpr):
    """Of every expert; those of a softmax over the chosen ones are their logits. Nobody's are as low as can be."""
    if SCORE == "softmax":
        probability = tl.exp(value - tl.max(value, 0))
        score = probability / tl.sum(probability, 0)
    elif SCORE == "sigmoid":
        score = 1 / (1 + tl.exp(-value))
    elif SCORE == "sqrt_softplus":
        soft = tl.where(value > 20.0, value, tl.log(1 + tl.exp(tl.minimum(value, 20.0))))
        score = tl.sqrt(soft)
    else:
        score = value
    return tl.where(known, score, NOTHING)


@triton.jit
def _in_best_groups(choice, GROUPS: tl.constexpr, KEPT: tl.constexpr, EACH: tl.constexpr):
    """What experts are chosen by, where they are of the groups whose two best are the best together."""
    grouped = tl.reshape(choice, (GROUPS, EACH))
    group, member = tl.arange(0, GROUPS), tl.arange(0, EACH)[None, :]
    first = tl.max(grouped, 1)
    where = tl.min(tl.where(grouped == first[:, None], member, EACH), 1)
    left = first + tl.max(tl.where(member == where[:, None], NOTHING, grouped), 1)
    kept = group < 0
    for _ in tl.static_range(KEPT):
        best = tl.min(tl.where(left == tl.max(left, 0), group, GROUPS), 0)
        kept = kept | (group == best)
        left = tl.where(group == best, NOTHING, left)
    return tl.reshape(tl.where(kept[:, None], grouped, NOTHING), (GROUPS * EACH,))


@triton.jit
def _route(
    logits, correction, told, gate, weights, chosen, experts, stride, gate_stride, scaling, SCORE: tl.constexpr,
    CORRECTED: tl.constexpr, TOLD: tl.constexpr, RENORMALISE: tl.constexpr, JOINED: tl.constexpr, GATED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best experts of one token, the first of equals first, or those it is told, and their weights."""
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    known = expert < experts
    wait_for_ahead()
    value = tl.load(logits + row * stride + expert, mask=known, other=NOTHING).to(tl.float32)
    score = _scores(value, known, SCORE)
    left = score
    if CORRECTED:
        left = tl.where(known, score + tl.load(correction + expert, mask=known, other=0.0).to(tl.float32), NOTHING)
    if GROUPS > 1:
        left = _in_best_groups(left, GROUPS, KEPT, BLOCK // GROUPS)
    best, where = tl.full([SLOTS], NOTHING, tl.float32), tl.zeros([SLOTS], tl.int32)
    for rank in tl.static_range(TOP):
        highest = tl.max(left, 0)
        if TOLD:
            index = tl.load(told + row * TOP + rank).to(tl.int32)
        else:
            index = tl.min(tl.where(left == highest, expert, BLOCK), 0)
        if TOLD or CORRECTED:
            highest = tl.max(tl.where(expert == index, score, NOTHING), 0)
        best = tl.where(slot == rank, highest, best)
        where = tl.where(slot == rank, index, where)
        left = tl.where(expert == index, NOTHING, left)
    taken = slot < TOP
    if SCORE == "chosen_softmax":
        best = tl.exp(best - tl.max(best, 0))
        best = (best / tl.sum(best, 0)).to(logits.dtype.element_ty).to(tl.float32)
    else:
        if RENORMALISE:
            best /= tl.maximum(tl.sum(tl.where(taken, best, 0.0), 0), 1e-20)
        best *= scaling
    if JOINED:
        last = 1.0
        if GATED:
            last = 1 / (1 + tl.exp(-tl.load(gate + row * gate_stride).to(tl.float32)))
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
    rows, experts = logits.shape
    top = router.experts_per_token
    weights = torch.empty(rows, top + joined, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, top + joined, dtype=torch.int32, device=logits.device)
    _route[(rows,)](
        logits, correction, told, gate, weights, chosen, experts, logits.stride(0),
        0 if gate is None else gate.stride(0), router.scaling, SCORE=router.score,
        CORRECTED=correction is not None, TOLD=told is not None, RENORMALISE=router.renormalise, JOINED=int(joined),
        GATED=gate is not None, GROUPS=router.groups if correction is not None and told is None else 1,
        KEPT=router.kept_groups, TOP=top, SLOTS=triton.next_power_of_2(top + joined),
        BLOCK=triton.next_power_of_2(experts), num_warps=1, launch_pdl=starts_early(),
    )  # fmt: skip
    return weights, chosen
