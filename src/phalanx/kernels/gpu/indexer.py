"""What an indexer makes of cached tokens: a score for each of them and each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.compressed_rows import place_of
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _index_scores(
    q, weights, keys, tables, slots, positions, scores, table_width, width, HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, ROOM: tl.constexpr, RATIO: tl.constexpr, HEADS_WIDE: tl.constexpr, DIM_WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One row and a stretch of positions, or of entries. What the row does not look at has the lowest score of all."""
    let_next_start()
    row = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    wait_for_ahead()
    last = (tl.load(positions + row).to(tl.int32) + 1) // RATIO - 1
    target, inside = scores + row * width + position, position < width
    if tl.program_id(0) * TOKENS > last:
        tl.store(target, tl.full([TOKENS], float("-inf"), tl.float32), mask=inside)
        return
    seen = (position <= last) & inside
    table = tables + tl.load(slots + row).to(tl.int64) * table_width
    h, d = tl.arange(0, HEADS_WIDE), tl.arange(0, DIM_WIDE)
    entry = place_of(table, position, seen, table_width, RATIO, PAGE, ROOM) * DIM
    kept = tl.load(keys + entry[:, None] + d, mask=seen[:, None] & (d < DIM), other=0.0)
    head = row * HEADS + h
    queries = tl.load(q + head[None, :] * DIM + d[:, None], mask=(h < HEADS)[None, :] & (d < DIM)[:, None], other=0.0)
    weight = tl.load(weights + head, mask=h < HEADS, other=0.0)
    found = tl.maximum(tl.dot(kept, queries, input_precision="ieee"), 0.0)
    total = tl.sum(found * weight[None, :], 1)
    tl.store(target, tl.where(seen, total, float("-inf")), mask=inside)


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    width: int,
    ratio: int = 1,
    block_size: int | None = None,
) -> Tensor:
    """[rows, width], by the sum over index heads of weight * relu(q . key).

    With a `ratio`, keys are those of entries that stand for so many tokens each, of which a block has `block_size`.
    """
    rows, heads, dim = q.shape
    scores = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    tokens = 32 if q.dtype == torch.float32 else 64
    _index_scores[(triton.cdiv(width, tokens), rows)](
        q, weights, keys, tables, slots, positions, scores, tables.stride(0), width, HEADS=heads, DIM=dim,
        PAGE=block_size or keys.shape[1], ROOM=keys.shape[1], RATIO=ratio,
        HEADS_WIDE=max(16, triton.next_power_of_2(heads)), DIM_WIDE=max(16, triton.next_power_of_2(dim)), TOKENS=tokens,
        num_warps=4, launch_pdl=starts_early(),
    )  # fmt: skip
    return scores
