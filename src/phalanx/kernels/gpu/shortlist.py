"""`kernels.shortlist` on a GPU: one launch finds the best of every stretch, one looks at the best of these again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.candidates import CANDIDATES, Found, stretch_of
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.gemm import counters
from phalanx.kernels.gpu.sampling import first_best, scores_of
from phalanx.kernels.sampling_table import TOKEN

COLUMNS = 4096
"""That one program looks through."""


@triton.jit
def _best_of_stretches(scores, best, where, width, stretches, STRETCH: tl.constexpr, EACH: tl.constexpr):
    let_next_start()
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1) * EACH + tl.arange(0, EACH)
    column = stretch[:, None] * STRETCH + tl.arange(0, STRETCH)[None, :]
    wait_for_ahead()
    value = scores_of(scores, row, width, column)
    top = tl.max(value, 1)
    first = tl.min(tl.where(value == top[:, None], column, width), 1)
    tl.store(best + row * stretches + stretch, top, mask=stretch < stretches)
    tl.store(where + row * stretches + stretch, first, mask=stretch < stretches)


@triton.jit
def _look_again(
    scores, best, where, hidden, weight, again, columns, counter, tokens, scored, width, inputs, stretches, first,
    CANDIDATES: tl.constexpr, STRETCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One stretch, whose best is scored again if fewer than so many others are better. Who does so last compares."""
    let_next_start()
    row, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stretch, column = tl.arange(0, STRETCHES), tl.arange(0, BLOCK)
    wait_for_ahead()
    value = tl.load(best + row * stretches + stretch, mask=stretch < stretches, other=float("-inf"))
    mine = tl.load(best + row * stretches + own)
    ahead = (value > mine) | ((value == mine) & (stretch < own))
    rank = tl.sum(ahead.to(tl.int32), 0)
    if rank < CANDIDATES:
        output = tl.load(where + row * stretches + own)
        taken = tl.load(weight + output.to(tl.int64) * inputs + column, mask=column < inputs, other=0.0)
        x = tl.load(hidden + row * inputs + column, mask=column < inputs, other=0.0)
        score = tl.sum(x.to(tl.float32) * taken.to(tl.float32), 0).to(scores.dtype.element_ty)
        tl.store(scores + row * width + output, score)
        tl.store(again + row * CANDIDATES + rank, score.to(tl.float32))
        tl.store(columns + row * CANDIDATES + rank, output)
        tl.debug_barrier()
        candidates = tl.minimum(stretches, CANDIDATES)
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


def look_again(scores: Tensor, hidden: Tensor, weight: Tensor, first: int) -> Found:
    (rows, width), inputs, device = scores.shape, weight.shape[1], scores.device
    stretch = stretch_of(width)
    stretches, each = triton.cdiv(width, stretch), max(1, COLUMNS // stretch)
    best, again, scored = (
        torch.empty(rows, size, dtype=torch.float32, device=device) for size in (stretches, CANDIDATES, 2)
    )
    where, columns = (torch.empty(rows, size, dtype=torch.int32, device=device) for size in (stretches, CANDIDATES))
    tokens = torch.empty(rows, dtype=TOKEN, device=device)
    _best_of_stretches[(rows, triton.cdiv(stretches, each))](
        scores, best, where, width, stretches, STRETCH=stretch, EACH=each, launch_pdl=starts_early()
    )
    _look_again[(rows, stretches)](
        scores, best, where, hidden.contiguous(), weight, again, columns, counters(device), tokens, scored, width,
        inputs, stretches, first, CANDIDATES=CANDIDATES, STRETCHES=triton.next_power_of_2(stretches),
        BLOCK=triton.next_power_of_2(inputs), launch_pdl=starts_early(),
    )  # fmt: skip
    return Found(tokens, scored)


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
