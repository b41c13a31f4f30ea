"""Latent attention of prompts that begin in this step: their latents are widened to keys and values of every head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.latent import turned
from phalanx.kernels.gpu.shared_memory import is_hopper, is_roomy
from phalanx.kernels.tiling import PROMPT_TILE, PrefillTiles


@triton.jit
def _absorb_block(
    low, rest, high, acc, peak, total, low_keys, rest_keys, high_keys, values_of, asked, row_of_zero, column,
    at, highest, scale, NOPE: tl.constexpr, LOW: tl.constexpr, RANK: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """A block of keys into a running softmax. With CUT it ends at `highest`: behind that another prompt may begin."""
    row, position = row_of_zero + at, at + tl.arange(0, KEYS)
    scores = tl.dot(low, low_keys.load([row, column]).T, input_precision="ieee")
    if LOW < NOPE:
        scores = tl.dot(rest, rest_keys.load([row, column + LOW]).T, scores, input_precision="ieee")
    scores = tl.dot(high, high_keys.load([row, RANK]).T, scores, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(position[None, :] <= asked[:, None], scores, -1.0e30)
    top = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(peak - top)
    total = total * shrink + tl.sum(weights, 1)
    values = values_of.load([row, column + NOPE])
    if CUT:
        values = tl.where((position < highest)[:, None], values, tl.zeros_like(values))
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def _absorb(
    low, rest, high, acc, peak, total, low_keys, rest_keys, high_keys, values_of, asked, row_of_zero, column,
    lowest, highest, scale, NOPE: tl.constexpr, LOW: tl.constexpr, RANK: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Keys from position `lowest` to before `highest`; position 0 lies in row `row_of_zero`.

    Blocks are whole, but for the last one with MASKED. Tensor cores take the values of whole ones as they lie.
    """
    LIES: tl.constexpr = MASKED and low.dtype != tl.float32
    whole = lowest + (highest - lowest) // KEYS * KEYS if LIES else highest
    for at in range(lowest, whole, KEYS):
        acc, peak, total = _absorb_block(
            low, rest, high, acc, peak, total, low_keys, rest_keys, high_keys, values_of, asked, row_of_zero, column,
            at, highest, scale, NOPE, LOW, RANK, KEYS, MASKED, MASKED and not LIES,
        )  # fmt: skip
    if LIES and whole < highest:
        acc, peak, total = _absorb_block(
            low, rest, high, acc, peak, total, low_keys, rest_keys, high_keys, values_of, asked, row_of_zero, column,
            whole, highest, scale, NOPE, LOW, RANK, KEYS, MASKED, True,
        )  # fmt: skip
    return acc, peak, total


@triton.jit
def _attend_wide(
    q, cos, sin, low_keys, rest_keys, high_keys, values_of, tiles, out, scale, HEADS: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, LOW: tl.constexpr,
    LOW_WIDE: tl.constexpr, REST_WIDE: tl.constexpr, ROPE_WIDE: tl.constexpr, V_WIDE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One head of a tile of queries, or of part of one: the keys that all of them see, then those around the diagonal.

    `scale` is for powers of 2.
    """
    let_next_start()
    tile, head = tiles + tl.program_id(1) // PARTS * 5, tl.program_id(0)
    skipped = tl.program_id(1) % PARTS * ROWS
    wait_for_ahead()
    first, count, start = tl.load(tile + 1) + skipped, tl.load(tile + 2) - skipped, tl.load(tile + 3) + skipped
    row_of_zero = first - start
    if count <= 0:
        return
    r = tl.arange(0, ROWS)
    known, row = (r < count)[:, None], (first + r).to(tl.int64)[:, None]
    base = q + (row * HEADS + head) * (NOPE + ROPE)
    d = tl.arange(0, LOW_WIDE)
    low = tl.load(base + d, mask=known & (d < LOW), other=0.0)
    e = tl.arange(0, REST_WIDE)
    rest = tl.load(base + LOW + e, mask=known & (e < NOPE - LOW), other=0.0)
    f = tl.arange(0, ROPE_WIDE)[None, :]
    high = turned(base + NOPE, cos + row * ROPE, sin + row * ROPE, f, known & (f < ROPE), ROPE)
    peak = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_WIDE], tl.float32)
    column = head * (NOPE + V)
    acc, peak, total = _absorb(
        low, rest, high, acc, peak, total, low_keys, rest_keys, high_keys, values_of, start + r, row_of_zero, column,
        0, start, scale, NOPE, LOW, RANK, KEYS, False,
    )  # fmt: skip
    acc, peak, total = _absorb(
        low, rest, high, acc, peak, total, low_keys, rest_keys, high_keys, values_of, start + r, row_of_zero, column,
        start, start + tl.minimum(count, ROWS), scale, NOPE, LOW, RANK, KEYS, True,
    )  # fmt: skip
    v = tl.arange(0, V_WIDE)
    spot = out + (row * HEADS + head) * V + v
    tl.store(spot, (acc / total[:, None]).to(out.dtype.element_ty), mask=known & (v < V))


def prefill_wide(
    q: Tensor, cos: Tensor, sin: Tensor, wide: Tensor, kept: Tensor, cut: PrefillTiles, scale: float, out: Tensor
) -> None:
    """Prompts from their first token on, into their rows of `out`, [tokens, heads, v_dim].

    `wide` has keys and values of every token and head, [tokens, heads, nope_dim + v_dim]; `kept` what is cached of the
    same tokens, [tokens, kv_rank + rope_dim].
    """
    (tokens, heads, head_dim), rope, v = q.shape, cos.shape[-1], out.shape[2]
    nope, rank = head_dim - rope, kept.shape[1] - rope
    low = nope if nope < 16 else 1 << (nope.bit_length() - 1)
    widths = {
        "LOW_WIDE": _wide(low), "REST_WIDE": _wide(nope - low), "ROPE_WIDE": _wide(rope), "V_WIDE": _wide(v),
    }  # fmt: skip
    rows, keys, warps, stages = _shape(q.dtype)
    flat = wide.view(tokens, -1)
    low_keys, rest_keys, values = (
        TensorDescriptor.from_tensor(flat, [keys, widths[name]]) for name in ("LOW_WIDE", "REST_WIDE", "V_WIDE")
    )
    parts = PROMPT_TILE // rows
    _attend_wide[(heads, len(cut.tiles) * parts)](
        q, cos, sin, low_keys, rest_keys, TensorDescriptor.from_tensor(kept, [keys, widths["ROPE_WIDE"]]), values,
        cut.tiles, out, scale * 1.4426950408889634, HEADS=heads, NOPE=nope, ROPE=rope, V=v, RANK=rank, LOW=low,
        **widths, ROWS=rows, KEYS=keys, PARTS=parts, num_warps=warps, num_stages=stages, launch_pdl=starts_early(),
    )  # fmt: skip


def _wide(dimensions: int) -> int:
    return max(16, triton.next_power_of_2(dimensions))


def _shape(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Queries and keys at once, warps, stages."""
    if dtype == torch.float32:
        return 32, 16, 4, 1
    if not is_hopper():
        return 64, 32, 4, 2 if is_roomy() else 1
    return 128, 64, 8, 2
