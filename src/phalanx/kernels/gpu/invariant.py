"""Sums in one order, whatever rows are beside a row and however many ranks share the work.

One shape of tiles serves every number of rows. Where an inner dimension is cut into leaves, each leaf of a tile is a
program that leaves its sum in float32, and `join` adds the leaves up as a tree: so the leaves alone decide the bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.attention import join_splits
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.gemm import Tile
from phalanx.kernels.gpu.rows import gate_and_mul
from phalanx.kernels.gpu.shared_memory import stages_here
from phalanx.kernels.gpu.sort import sort_by_expert
from phalanx.kernels.tiling import DecodeRows
from phalanx.spec.ffn import Activation

HALF_TILE = Tile(64, 128, 64, 4, 4)
WIDE_TILE = Tile(32, 64, 32, 4, 2)
"""For float32, which has no tensor cores."""

MOST_PART_BYTES = 2**28
"""What the leaves of one launch may take before they are joined: more rows go in several launches."""

COLUMNS_AT_ONCE = 1024
SPLITS = 8
"""Programs that share a sequence: the k-th takes every tile of tokens whose number is k modulo these."""

HEADS_AT_ONCE = 16
MOST_ATTENDING = 512
"""Rows of one launch of attention, whose parts lie in memory."""


def _tile_for(dtype: torch.dtype) -> Tile:
    return WIDE_TILE if dtype == torch.float32 else HALF_TILE


@triton.jit
def _leaf_of_tile(
    x, row, known, weight, output, outputs, inputs, first, stop,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """weight[output] @ x[row].T over the inputs from `first` to before `stop`, in float32, [OUTPUTS, ROWS]."""
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    weight_row = weight + output[:, None].to(tl.int64) * inputs
    x_row = x + row[None, :].to(tl.int64) * inputs
    for start in range(first, stop, INPUTS):
        k = start + tl.arange(0, INPUTS)
        w = tl.load(weight_row + k[None, :], mask=(output[:, None] < outputs) & (k[None, :] < stop), other=0.0)
        a = tl.load(x_row + k[:, None], mask=known[None, :] & (k[:, None] < stop), other=0.0)
        acc = tl.dot(w, a, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, outputs, inputs, leaf_width, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """One leaf of one tile, into out[leaf]. A bias belongs to the first leaf."""
    let_next_start()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    leaf = tl.program_id(2)
    wait_for_ahead()
    first = leaf * leaf_width
    acc = _leaf_of_tile(
        x, row, row < rows, weight, output, outputs, inputs, first, first + leaf_width, ROWS, OUTPUTS, INPUTS
    )
    if HAS_BIAS and leaf == 0:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    place = (leaf.to(tl.int64) * rows + row[None, :]) * outputs + output[:, None]
    mask = (output[:, None] < outputs) & (row[None, :] < rows)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def _expert_product(
    x, weight, order, owner, pair_weights, out, pairs, pairs_a_row, outputs, inputs, leaf_width,
    WEIGHED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """The same for a tile of one expert's pairs: row x[pair // pairs_a_row], into out[leaf, pair]."""
    let_next_start()
    tile, leaf = tl.program_id(0), tl.program_id(2)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    wait_for_ahead()
    expert = tl.load(owner + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order + tile * ROWS + tl.arange(0, ROWS))
        known, first = pair < pairs, leaf * leaf_width
        acc = _leaf_of_tile(
            x, pair // pairs_a_row, known, weight + expert * outputs * inputs, output, outputs, inputs, first,
            first + leaf_width, ROWS, OUTPUTS, INPUTS,
        )  # fmt: skip
        if WEIGHED:
            acc *= tl.load(pair_weights + pair, mask=known, other=0.0)[None, :]
        place = (leaf.to(tl.int64) * pairs + pair[None, :]) * outputs + output[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=(output[:, None] < outputs) & known[None, :])


@triton.jit
def _one(parts, beside, mask, width, leaf, apart, beside_apart, TOP: tl.constexpr):
    """A leaf: the sum of a token's pairs in their order, and what stands beside them."""
    parts += leaf * apart
    total = tl.load(parts, mask=mask, other=0.0).to(tl.float32)
    for pair in tl.static_range(1, TOP):
        total += tl.load(parts + pair * width, mask=mask, other=0.0).to(tl.float32)
    if beside is not None:
        total += tl.load(beside + leaf * beside_apart, mask=mask, other=0.0)
    return total


@triton.jit
def _two(parts, beside, mask, width, leaf, apart, beside_apart, TOP: tl.constexpr):
    left = _one(parts, beside, mask, width, leaf, apart, beside_apart, TOP)
    return left + _one(parts, beside, mask, width, leaf + 1, apart, beside_apart, TOP)


@triton.jit
def _four(parts, beside, mask, width, leaf, apart, beside_apart, TOP: tl.constexpr):
    left = _two(parts, beside, mask, width, leaf, apart, beside_apart, TOP)
    return left + _two(parts, beside, mask, width, leaf + 2, apart, beside_apart, TOP)


@triton.jit(do_not_specialize=["apart", "beside_apart"])
def _join(
    parts, beside, out, width, row_apart, apart, beside_apart, TOP: tl.constexpr, LEAVES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's leaves, which lie `apart`, as a tree, neighbours first."""
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, apart, beside_apart = column < width, tl.cast(apart, tl.int64), tl.cast(beside_apart, tl.int64)
    wait_for_ahead()
    parts += row * row_apart + column
    if beside is not None:
        beside += row * width + column
    if LEAVES == 1:
        total = _one(parts, beside, mask, width, 0, apart, beside_apart, TOP)
    elif LEAVES == 2:
        total = _two(parts, beside, mask, width, 0, apart, beside_apart, TOP)
    else:
        total = _four(parts, beside, mask, width, 0, apart, beside_apart, TOP)
        if LEAVES == 8:
            total += _four(parts, beside, mask, width, 4, apart, beside_apart, TOP)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=mask)


def _joined(
    parts: Tensor, out: Tensor, row_apart: int, apart: int, leaves: int, top: int = 1, beside: Tensor | None = None
) -> None:
    rows, width = out.shape
    block = min(COLUMNS_AT_ONCE, triton.next_power_of_2(width))
    _join[(rows, triton.cdiv(width, block))](
        parts, beside, out, width, row_apart, apart, 0 if beside is None else beside.stride(0), TOP=top, LEAVES=leaves,
        BLOCK=block, launch_pdl=starts_early(),
    )  # fmt: skip


def join_ranks(gathered: Tensor, ranks: int, dtype: torch.dtype) -> Tensor:
    """The tree of all ranks' parts, which lie side by side in each row."""
    rows, width = gathered.shape[0], gathered.shape[1] // ranks
    out = torch.empty(rows, width, dtype=dtype, device=gathered.device)
    _joined(gathered, out, ranks * width, width, ranks)
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias, summed by leaves of the inner dimension and rounded once."""
    x, outputs, tile = x.contiguous(), len(weight), _tile_for(x.dtype)
    out = torch.empty(len(x), outputs, dtype=dtype, device=x.device)
    at_once = max(tile.rows, MOST_PART_BYTES // (4 * leaves * outputs) // tile.rows * tile.rows)
    for taken, given in zip(x.split(at_once), out.split(at_once), strict=True):
        if leaves == 1:
            _leaves_into(given, taken, weight, bias, 1, tile)
        else:
            parts = torch.empty(leaves, *given.shape, dtype=torch.float32, device=x.device)
            _leaves_into(parts, taken, weight, bias, leaves, tile)
            _joined(parts, given, outputs, given.numel(), leaves)
    return out


def unit_sums(x: Tensor, weight: Tensor, bias: Tensor | None, units: int) -> Tensor:
    """The same before the units are joined, [units, rows, outputs]."""
    parts = torch.empty(units, len(x), len(weight), dtype=torch.float32, device=x.device)
    _leaves_into(parts, x.contiguous(), weight, bias, units, _tile_for(x.dtype))
    return parts


def _leaves_into(parts: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, tile: Tile) -> None:
    rows, (outputs, inputs) = len(x), weight.shape
    _product[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs), leaves)](
        x, weight, bias, parts, rows, outputs, inputs, inputs // leaves, HAS_BIAS=bias is not None,
        ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, num_warps=tile.warps,
        num_stages=stages_here(tile.stages), launch_pdl=starts_early(),
    )  # fmt: skip


def experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, activation: Activation, units: int,
    dtype: torch.dtype, beside: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of each unit the sum over a token's experts, in the order in which they were chosen, and of what stands beside
    them, [units, rows, width]; of the units a tree.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    at_once = max(1, MOST_PART_BYTES // (4 * units * chosen.shape[1] * x.shape[1]))
    for first in range(0, len(x), at_once):
        part = slice(first, first + at_once)
        own = None if beside is None else beside[:, part]
        _experts(x[part], gate_up, down, weights[part], chosen[part], activation, units, out[part], own)
    return out


def _experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, activation: Activation, units: int,
    out: Tensor, beside: Tensor | None,
) -> None:  # fmt: skip
    (rows, top), tile = chosen.shape, _tile_for(x.dtype)
    order, owner = sort_by_expert(chosen, len(gate_up), tile.rows)
    entered = x.new_empty(rows * top, gate_up.shape[1])
    _expert_leaves(x.contiguous(), gate_up, order, owner, None, entered, top, 1, tile)
    inner = gate_and_mul(entered, activation)
    assert isinstance(inner, Tensor)
    parts = torch.empty(units, rows * top, down.shape[1], dtype=torch.float32, device=x.device)
    _expert_leaves(inner, down, order, owner, weights.contiguous(), parts, 1, units, tile)
    _joined(parts, out, top * down.shape[1], parts[0].numel(), units, top, beside)


def _expert_leaves(
    x: Tensor, weight: Tensor, order: Tensor, owner: Tensor, pair_weights: Tensor | None, out: Tensor,
    pairs_a_row: int, leaves: int, tile: Tile,
) -> None:  # fmt: skip
    _, outputs, inputs = weight.shape
    _expert_product[(len(owner), triton.cdiv(outputs, tile.outputs), leaves)](
        x, weight, order, owner, pair_weights, out, out.shape[-2], pairs_a_row, outputs, inputs, inputs // leaves,
        WEIGHED=pair_weights is not None, ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        num_warps=tile.warps, num_stages=stages_here(tile.stages), launch_pdl=starts_early(),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _attend(
    q, cache, tables, slots, positions, sinks, partial, peaks, totals, q_stride, table_width, window, scale,
    SINKS: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Some query heads of one KV head against every SPLITS-th tile of a sequence, counted from its first position."""
    let_next_start()
    group: tl.constexpr = HEADS // KV_HEADS
    runs: tl.constexpr = (group + GROUP - 1) // GROUP
    kv, row, split = tl.program_id(0) // runs, tl.program_id(1).to(tl.int64), tl.program_id(2)
    g, d = (tl.program_id(0) % runs) * GROUP + tl.arange(0, GROUP), tl.arange(0, DIM)
    known, inside = g < group, d < HEAD_DIM
    head = kv * group + g
    wait_for_ahead()
    queries = tl.load(q + row * q_stride + head[:, None] * HEAD_DIM + d, mask=known[:, None] & inside, other=0.0)
    last = tl.load(positions + row).to(tl.int32)
    table = tables + tl.load(slots + row).to(tl.int64) * table_width
    first = last * 0
    if WINDOWED:
        first = last // window * window if CHUNKED else tl.maximum(last - window + 1, 0)
    oldest = first // TOKENS
    begin = oldest + (split + SPLITS - oldest % SPLITS) % SPLITS
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    if SINKS and split == 0:
        peak = tl.load(sinks + head, mask=known, other=0.0).to(tl.float32)
        total += 1.0
    acc = tl.zeros([GROUP, DIM], tl.float32)
    for tile in range(begin, last // TOKENS + 1, SPLITS):
        position = tile * TOKENS + tl.arange(0, TOKENS)
        seen = (position >= first) & (position <= last)
        page = tl.load(table + position // PAGE, mask=seen, other=0).to(tl.int64)
        entry = (page * PAGE + position % PAGE) * 2 * KV_HEADS + kv
        keys = tl.load(cache + entry[None, :] * HEAD_DIM + d[:, None], mask=seen[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        given = tl.exp(scores - top[:, None])
        shrink = tl.exp(peak - top)
        total = total * shrink + tl.sum(given, 1)
        spot = (entry + KV_HEADS)[:, None] * HEAD_DIM + d
        values = tl.load(cache + spot, mask=seen[:, None] & inside, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(given.to(values.dtype), values, input_precision="ieee")
        peak = top
    place = (row * HEADS + head) * SPLITS + split
    tl.store(peaks + place, peak, mask=known)
    tl.store(totals + place, total, mask=known)
    tl.store(partial + place[:, None] * HEAD_DIM + d, acc, mask=known[:, None] & inside)


def attention(
    q: Tensor, cache: Tensor, rows: DecodeRows, window: int | None, chunked: bool, scale: float, sinks: Tensor | None
) -> Tensor:
    """Every row as the last token of its sequence so far, [rows, heads, head_dim]."""
    (count, heads, head_dim), (_, page, _, kv_heads, _) = q.shape, cache.shape
    wide, dim = q.dtype == torch.float32, max(16, triton.next_power_of_2(head_dim))
    runs = triton.cdiv(heads // kv_heads, HEADS_AT_ONCE)
    out = torch.empty(count, heads, head_dim, dtype=q.dtype, device=q.device)
    most = min(count, MOST_ATTENDING)
    partial = torch.empty(most, heads, SPLITS, head_dim, dtype=torch.float32, device=q.device)
    peaks, totals = (torch.empty(most, heads, SPLITS, dtype=torch.float32, device=q.device) for _ in range(2))
    for start in range(0, count, MOST_ATTENDING):
        part = slice(start, start + MOST_ATTENDING)
        taken, given = q[part], out[part]
        _attend[(kv_heads * runs, len(taken), SPLITS)](
            taken, cache, rows.tables, rows.slots[part], rows.positions[part], sinks, partial, peaks, totals,
            q.stride(0), rows.tables.stride(0), window or 0, scale, SINKS=sinks is not None,
            WINDOWED=window is not None, CHUNKED=chunked, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE=page,
            SPLITS=SPLITS, GROUP=HEADS_AT_ONCE, DIM=dim, TOKENS=32 if wide else 64, num_warps=4,
            num_stages=stages_here(2 if wide else 3), launch_pdl=starts_early(),
        )  # fmt: skip
        join_splits(partial, peaks, totals, taken, given)
    return out
