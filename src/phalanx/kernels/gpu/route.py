"""The choice of experts, and of few pairs of token and expert their sorting by expert, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.gemm import counters
from phalanx.kernels.gpu.sort import FEW_PAIRS, WARPS, clear, empty_by_expert, place, room_for
from phalanx.kernels.pairs import ByExpert
from phalanx.spec.ffn import Router

NOTHING = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-(2**31))
"""Lower than the rank of any number."""

LANES = 32
"""Threads of a warp."""

_NUMBERS = ["rows", "stride", "gate_stride", "tiles"]
_PLACES = ["correction", "told", "weights", "chosen", "order", "owner", "counter"]
"""What is aligned Triton reads in fours and eights, and a token would be spread over several warps."""

FEW_TOKENS = 32
"""Up to these, one program chooses for all of them and sorts: it takes longer to wait for others and read theirs."""


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
    """Of each token."""
    return tl.max(tl.max(x, 0, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _scores(value, SCORE: tl.constexpr):
    """Of every expert; those of a softmax over the chosen ones are their logits."""
    if SCORE == "softmax":
        probability = tl.exp(value - _score_of(_largest(_ranked(value))))
        return probability / tl.sum(tl.sum(probability, 0, keep_dims=True), 2, keep_dims=True)
    if SCORE == "sigmoid":
        return 1 / (1 + tl.exp(-value))
    if SCORE == "sqrt_softplus":
        soft = tl.where(value > 20.0, value, tl.log(1 + tl.exp(tl.minimum(value, 20.0))))
        return tl.sqrt(soft)
    return value


@triton.jit
def _in_best_groups(rank, GROUPS: tl.constexpr, KEPT: tl.constexpr, EACH: tl.constexpr):
    """The ranks of experts that are of the groups whose two best are the best together; those of others are lowest."""
    group, member = tl.arange(0, GROUPS)[:, None, None], tl.arange(0, EACH)[None, None, :]
    first = tl.max(rank, 2, keep_dims=True)
    where = tl.min(tl.where(rank == first, member, EACH), 2, keep_dims=True)
    second = tl.max(tl.where(member == where, LOWEST, rank), 2, keep_dims=True)
    left = _ranked(_score_of(first) + _score_of(second))
    kept = group < 0
    for _ in tl.static_range(KEPT):
        best = tl.min(tl.where(left == tl.max(left, 0, keep_dims=True), group, GROUPS), 0, keep_dims=True)
        kept = kept | (group == best)
        left = tl.where(group == best, LOWEST, left)
    return tl.where(kept, rank, LOWEST)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_PLACES)
def _route(
    logits, correction, told, gate, weights, chosen, order, owner, counter, rows, experts, stride, gate_stride, tiles,
    scaling, SCORE: tl.constexpr, CORRECTED: tl.constexpr, TOLD: tl.constexpr, RENORMALISE: tl.constexpr,
    JOINED: tl.constexpr, GATED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
    ALONE: tl.constexpr, PAIRS: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """The best experts of some tokens, the first of equals first, or those they are told, and their weights.

    A token is a warp's, and its experts lie in the order [BLOCK / WIDTH, token, WIDTH], so that with a WIDTH of 32 all
    but the last step of what is found out about them is within a thread.
    With TILE pairs are sorted too: by the program that is alone, or the last of several to come to its end.
    """
    let_next_start()
    EACH: tl.constexpr = TOP + JOINED
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[None, :, None]
    row = tl.minimum(token, rows - 1).to(tl.int64)
    expert = tl.arange(0, BLOCK // WIDTH)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    slot = tl.arange(0, SLOTS)[None, None, :]
    known = expert < experts
    if CORRECTED:
        added = tl.load(correction + expert, mask=known, other=0.0).to(tl.float32)
    wait_for_ahead()
    value = tl.load(logits + row * stride + expert, mask=known, other=NOTHING).to(tl.float32)
    if TOLD:
        asked = tl.load(told + row * TOP + slot, mask=slot < TOP, other=0).to(tl.int32)
    if GATED:
        opening = tl.load(gate + row * gate_stride).to(tl.float32)
    if TILE:
        clear(order, rows * EACH, tiles, TILE)
    score = _scores(value, SCORE)
    left = tl.where(known, _ranked(score + added if CORRECTED else score), LOWEST)
    if GROUPS > 1:
        left = _in_best_groups(left, GROUPS, KEPT, WIDTH)
    best, where = tl.full([1, TOKENS, SLOTS], NOTHING, tl.float32), tl.zeros([1, TOKENS, SLOTS], tl.int32)
    for rank in tl.static_range(TOP):
        highest = _largest(left)
        if TOLD:
            index = tl.sum(tl.where(slot == rank, asked, 0), 2, keep_dims=True)
        else:
            index = tl.min(tl.min(tl.where(left == highest, expert, BLOCK), 0, keep_dims=True), 2, keep_dims=True)
        if TOLD or CORRECTED:
            highest = _largest(tl.where(expert == index, _ranked(score), LOWEST))
        best = tl.where(slot == rank, _score_of(highest), best)
        where = tl.where(slot == rank, index, where)
        left = tl.where(expert == index, LOWEST, left)
    if SCORE == "chosen_softmax":
        best = tl.exp(best - tl.max(best, 2, keep_dims=True))
        best = (best / tl.sum(best, 2, keep_dims=True)).to(logits.dtype.element_ty).to(tl.float32)
    else:
        if RENORMALISE:
            best /= tl.maximum(tl.sum(tl.where(slot < TOP, best, 0.0), 2, keep_dims=True), 1e-20)
        best *= scaling
    if JOINED:
        last = 1.0
        if GATED:
            last = 1 / (1 + tl.exp(-opening))
        best = tl.where(slot == TOP, last, best)
        where = tl.where(slot == TOP, experts, where)
    pair, taken = token * EACH + slot, (token < rows) & (slot < EACH)
    tl.store(weights + pair, best, mask=taken)
    tl.store(chosen + pair, where, mask=taken)
    if TILE:
        if ALONE:
            mine, pair, taken = tl.reshape(where, (PAIRS,)), tl.reshape(pair, (PAIRS,)), tl.reshape(taken, (PAIRS,))
            place(mine, pair, taken, order, owner, counter, TILE, SORTED)
        else:
            tl.debug_barrier()
            if tl.atomic_add(counter + SORTED, 1, sem="acq_rel") == tl.num_programs(0) - 1:
                lane = tl.arange(0, PAIRS)
                there = lane < rows * EACH
                mine = tl.load(chosen + lane, mask=there, other=0, cache_modifier=".cg")
                tl.store(counter + SORTED, 0)
                place(mine, lane, there, order, owner, counter, TILE, SORTED)


def routes(router: Router, correction: Tensor | None) -> bool:
    """Groups are reckoned with where there is a correction; they must be of a power of two."""
    in_groups = router.groups > 1 and correction is not None
    return not in_groups or (router.experts & (router.experts - 1) == 0 and router.groups & (router.groups - 1) == 0)


def route(
    logits: Tensor, router: Router, correction: Tensor | None, told: Tensor | None, joined: bool, gate: Tensor | None,
    tile_rows: int | None,
) -> tuple[Tensor, Tensor, ByExpert | None]:  # fmt: skip
    """Weights in float32, expert numbers as int32, and few of these by expert, if it is said in which tiles.

    Rows of logits may lie apart, with the gate between them.
    """
    (rows, experts), top, device = logits.shape, router.experts_per_token, logits.device
    each, block = top + joined, triton.next_power_of_2(experts)
    weights = torch.empty(rows, each, dtype=torch.float32, device=device)
    chosen = torch.empty(rows, each, dtype=torch.int32, device=device)
    groups = router.groups if correction is not None and told is None else 1
    slots = max(LANES, triton.next_power_of_2(each))
    tokens, alone, room, by_expert = 1, True, 0, None
    if tile_rows is not None and rows > 1 and rows * each <= FEW_PAIRS:
        tokens = FEW_TOKENS if WARPS < rows <= FEW_TOKENS else WARPS
        alone = rows <= tokens
        room = tokens * slots if alone else room_for(rows * each)
        by_expert = empty_by_expert(rows * each, experts + joined, tile_rows, device)
    order, owner = by_expert or (None, None)
    _route[(triton.cdiv(rows, tokens),)](
        logits, correction, told, gate, weights, chosen, order, owner, counters(device), rows, experts,
        logits.stride(0), 0 if gate is None else gate.stride(0), 0 if owner is None else len(owner), router.scaling,
        SCORE=router.score, CORRECTED=correction is not None, TOLD=told is not None, RENORMALISE=router.renormalise,
        JOINED=int(joined), GATED=gate is not None, GROUPS=groups, KEPT=router.kept_groups, TOP=top, SLOTS=slots,
        BLOCK=block, WIDTH=block // groups if groups > 1 else min(block, LANES), TOKENS=tokens,
        TILE=0 if by_expert is None else tile_rows, ALONE=alone, PAIRS=room,
        SORTED=triton.next_power_of_2(experts + joined), num_warps=min(tokens, WARPS), launch_pdl=starts_early(),
    )  # fmt: skip
    return weights, chosen, by_expert
