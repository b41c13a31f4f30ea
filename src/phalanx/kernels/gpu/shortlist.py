"""`kernels.shortlist` on a GPU: one launch finds the best of every comb, one looks at the best of these again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.candidates import CANDIDATES, COMBS, BestTokens
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.gemm import counters
from phalanx.kernels.gpu.sampling import first_best, scores_of
from phalanx.kernels.sampling_table import TOKEN

SCORES = 8192
"""That one program looks through, or fewer: of at least so many combs that it reads whole sectors of memory."""
LEAST_COMBS = 16


@triton.jit
def _best_of_combs(
    scores, best, where, width, combs, COMBS: tl.constexpr, LENGTH: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    let_next_start()
    row, comb = tl.program_id(0).to(tl.int64), tl.program_id(1) * EACH + tl.arange(0, EACH)
    column = tl.arange(0, LENGTH)[:, None] * COMBS + comb[None, :]
    wait_for_ahead()
    value = scores_of(scores, row, width, column)
    top = tl.max(value, 0)
    first = tl.min(tl.where(value == top[None, :], column, width), 0)
    tl.store(best + row * combs + comb, top, mask=comb < combs)
    tl.store(where + row * combs + comb, first, mask=comb < combs)


@triton.jit
def _look_again(
    scores, best, where, hidden, weight, again, columns, counter, tokens, scored, width, inputs, combs, first,
    CANDIDATES: tl.constexpr, COMBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One comb, whose best is scored again if fewer than so many others are better. Who does so last compares."""
    let_next_start()
    row, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    comb, column = tl.arange(0, COMBS), tl.arange(0, BLOCK)
    wait_for_ahead()
    value = tl.load(best + row * combs + comb, mask=comb < combs, other=float("-inf"))
    mine = tl.load(best + row * combs + own)
    rank = tl.sum(((value > mine) | ((value == mine) & (comb < own))).to(tl.int32), 0)
    if rank < CANDIDATES:
        output = tl.load(where + row * combs + own)
        taken = tl.load(weight + output.to(tl.int64) * inputs + column, mask=column < inputs, other=0.0)
        x = tl.load(hidden + row * inputs + column, mask=column < inputs, other=0.0)
        score = tl.sum(x.to(tl.float32) * taken.to(tl.float32), 0).to(scores.dtype.element_ty)
        tl.store(scores + row * width + output, score)
        tl.store(again + row * CANDIDATES + rank, score.to(tl.float32))
        tl.store(columns + row * CANDIDATES + rank, output)
        tl.debug_barrier()
        candidates = tl.minimum(combs, CANDIDATES)
        if tl.atomic_add(counter + row, 1, sem="acq_rel") == candidates - 1:
            place = tl.arange(0, CANDIDATES)
            at, known = row * CANDIDATES + place, place < candidates
            exact = tl.load(again + at, mask=known, other=float("-inf"), cache_modifier=".cg")
            numbers = tl.load(columns + at, mask=known, other=width, cache_modifier=".cg")
            top, found = first_best(tl.where(exact > float("-inf"), exact, float("-inf")), numbers, width)
            tl.store(tokens + row, first + found)
            tl.store(scored + row * 2, top)
            tl.store(scored + row * 2 + 1, (first + found).to(tl.float32))
            tl.store(counter + row, 0)


def look_again(scores: Tensor, hidden: Tensor, weight: Tensor, first: int) -> BestTokens:
    (rows, width), inputs, device = scores.shape, weight.shape[1], scores.device
    combs, length = min(COMBS, width), triton.next_power_of_2(triton.cdiv(width, COMBS))
    each = min(COMBS, max(LEAST_COMBS, SCORES // length))
    best, again, scored = (
        torch.empty(rows, size, dtype=torch.float32, device=device) for size in (combs, CANDIDATES, 2)
    )
    where, columns = (torch.empty(rows, size, dtype=torch.int32, device=device) for size in (combs, CANDIDATES))
    tokens = torch.empty(rows, dtype=TOKEN, device=device)
    _best_of_combs[(rows, triton.cdiv(combs, each))](
        scores, best, where, width, combs, COMBS=COMBS, LENGTH=length, EACH=each, num_warps=8,
        launch_pdl=starts_early(),
    )  # fmt: skip
    _look_again[(rows, combs)](
        scores, best, where, hidden.contiguous(), weight, again, columns, counters(device), tokens, scored, width,
        inputs, combs, first, CANDIDATES=CANDIDATES, COMBS=COMBS, BLOCK=triton.next_power_of_2(inputs),
        launch_pdl=starts_early(),
    )  # fmt: skip
    return BestTokens(tokens, scored)


@triton.jit
def _best_of_ranks(scored, tokens, ranks, RANKS: tl.constexpr):
    let_next_start()
    row, rank = tl.program_id(0).to(tl.int64), tl.arange(0, RANKS)
    wait_for_ahead()
    place = scored + (row * ranks + rank) * 2
    score = tl.load(place, mask=rank < ranks, other=float("-inf"))
    token = first_best(score, tl.load(place + 1, mask=rank < ranks, other=float("inf")), float("inf"))[1]
    tl.store(tokens + row, tl.maximum(token, 0.0).to(tl.int32))


def best_of_ranks(scored: Tensor) -> Tensor:
    rows, ranks = scored.shape[0], scored.shape[1] // 2
    tokens = torch.empty(rows, dtype=TOKEN, device=scored.device)
    _best_of_ranks[(rows,)](
        scored, tokens, ranks, RANKS=triton.next_power_of_2(ranks), num_warps=1, launch_pdl=starts_early()
    )
    return tokens
