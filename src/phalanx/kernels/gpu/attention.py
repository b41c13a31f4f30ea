"""Attention over the paged cache: one token a sequence, and stretches of prompts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.kernels.fp8 import LARGEST, Quantised
from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.gpu.shared_memory import is_roomy, stages_here
from phalanx.kernels.tiling import PROMPT_TILE, DecodeRows, PrefillTiles, splits_of

TILE_BYTES = 65536
"""Of the keys, or of the queries of a prompt, that a program takes at once; half of it where shared memory is short."""

MANY_PROGRAMS, FEW_PROGRAMS = 512, 16
"""From so many on, short tiles and few warps keep more loads in flight; with fewer, long tiles do, but for so few that
most of the time goes by before the first tile is there.
"""

WIDE_MANY = 128
"""Above these, longer tiles of wide heads are better."""

KEYS_AT_ONCE = 64
JOINED_AT_ONCE = 2048
"""Numbers of partial sums that a warp has registers for."""


@triton.jit
def to_meet(queries, cache):
    """The queries in the dtype that the cache is widened to. From e4m3 a GPU is quick to float16, slow to bfloat16."""
    if cache.dtype.element_ty.is_fp8() and queries.dtype == tl.bfloat16:
        queries = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        queries = queries.to(tl.float16)
    return queries


@triton.jit
def _widened(values, queries):
    """Cached values in the queries' dtype.

    A cast would move behind the change of layout that the tensor cores want, where bytes are read one by one. PTX that
    may have effects, as the compiler is told, stays where it is, on values as they were loaded.
    """
    if values.dtype.is_fp8() and queries.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
            "=r,=r,r", [values.to(tl.uint8, bitcast=True)], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    return values.to(queries.dtype)


@triton.jit
def attend_tile(queries, keys, values, seen, acc, peak, total, scale):
    """Some tokens of the cache, with what came before them."""
    scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp(scores - top[:, None])
    shrink = tl.exp(peak - top)
    total = total * shrink + tl.sum(weights, 1)
    values = _widened(values, queries)
    acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return acc, top, total


@triton.jit
def _store_heads(out, out_scales, attended, place, scale_place, mask, known, like, LARGEST: tl.constexpr):
    """A head for each row. For FP8, where a head is a group of its own, it is rounded as it would be without."""
    if out_scales is None:
        tl.store(out + place, attended.to(out.dtype.element_ty), mask=mask)
    else:
        rounded = attended.to(like.dtype.element_ty).to(tl.float32)
        factor = tl.maximum(tl.max(tl.abs(rounded), 1), 1e-10) / LARGEST
        tl.store(out + place, (rounded / factor[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(out_scales + scale_place, factor, mask=known)


@triton.jit
def store_stretch(
    acc, peak, total, q, cache, out, out_scales, partial, peaks, totals, value_scale, out_rows, row, head, split, known,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, DIM: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """What is attended, or what it is made of where there are several stretches."""
    d = tl.arange(0, DIM)
    mask = known[:, None] & (d < HEAD_DIM)
    if cache.dtype.element_ty.is_fp8():
        acc *= value_scale
    if SPLITS == 1:
        place, scale_place = (row * HEADS + head)[:, None] * HEAD_DIM + d, head.to(tl.int64) * out_rows + row
        attended = acc / total[:, None]
        _store_heads(out, out_scales, attended, place, scale_place, mask, known, q, LARGEST)
    else:
        place = (row * HEADS + head) * SPLITS + split
        tl.store(peaks + place, peak, mask=known)
        tl.store(totals + place, total, mask=known)
        tl.store(partial + place[:, None] * HEAD_DIM + d, acc, mask=mask)


@triton.jit(do_not_specialize=["out_rows"], do_not_specialize_on_alignment=["slots", "positions"])
def _decode(
    q, cache, tables, slots, positions, sinks, out, out_scales, partial, peaks, totals, q_stride, table_width, window,
    scale, value_scale, out_rows, SINKS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One stretch of one sequence for the query heads of one KV head: a partial sum with its peak and total.

    A sink is a score of which nothing is attended: the first stretch begins with it.
    """
    let_next_start()
    kv, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    g, d = tl.arange(0, GROUP), tl.arange(0, DIM)
    known, inside = g[:, None] < group, d < HEAD_DIM
    head = kv * group + g
    wait_for_ahead()
    queries = tl.load(q + row * q_stride + head[:, None] * HEAD_DIM + d, mask=known & inside, other=0.0)
    queries = to_meet(queries, cache)
    last = tl.load(positions + row)
    table = tables + tl.load(slots + row) * table_width
    first = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    share = tl.cdiv(tl.cdiv(last + 1 - first, TOKENS), SPLITS) * TOKENS
    start = first + split * share
    stop = tl.minimum(start + share, last + 1)
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    if SINKS and split == 0:
        peak = tl.load(sinks + head, mask=g < group, other=0.0).to(tl.float32)
        total += 1.0
    acc = tl.zeros([GROUP, DIM], tl.float32)
    for at in range(start, stop, TOKENS):
        position = at + tl.arange(0, TOKENS)
        seen = position < stop
        page = tl.load(table + position // PAGE, mask=seen, other=0).to(tl.int64)
        entry = (page * PAGE + position % PAGE) * 2 * KV_HEADS + kv
        keys = tl.load(cache + entry[None, :] * HEAD_DIM + d[:, None], mask=seen[None, :] & inside[:, None], other=0.0)
        spot = (entry + KV_HEADS)[:, None] * HEAD_DIM + d
        values = tl.load(cache + spot, mask=seen[:, None] & inside, other=0.0)
        acc, peak, total = attend_tile(queries, keys, values, seen, acc, peak, total, scale)
    store_stretch(
        acc, peak, total, q, cache, out, out_scales, partial, peaks, totals, value_scale, out_rows, row, head, split,
        g < group, HEADS, HEAD_DIM, SPLITS, DIM, LARGEST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["out_rows"])
def _join_splits(
    partial, peaks, totals, q, out, out_scales, out_rows, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr, DIM: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """The partial sums of one query head, each brought to the common peak."""
    let_next_start()
    place = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, DIM)
    wait_for_ahead()
    peak = tl.load(peaks + place * SPLITS + s)
    total = tl.load(totals + place * SPLITS + s)
    where = (place * SPLITS + s)[:, None] * HEAD_DIM + d
    parts = tl.load(partial + where, mask=(d < HEAD_DIM)[None, :], other=0.0)
    shrink = tl.exp(peak - tl.max(peak, 0))
    joined = tl.sum(parts * shrink[:, None], 0) / tl.sum(total * shrink, 0)
    one, scale_place = tl.arange(0, 1), place % HEADS * out_rows + place // HEADS
    _store_heads(
        out, out_scales, joined[None, :], place * HEAD_DIM + d[None, :], scale_place + one, (d < HEAD_DIM)[None, :],
        one < 1, q, LARGEST,
    )  # fmt: skip


def _tile_bytes() -> int:
    return TILE_BYTES if is_roomy() else TILE_BYTES // 2


def _shape_of(programs: int, dim: int, uneven: bool) -> tuple[int, int, int]:
    """Tokens at once, warps and stages. Measured on an H200, `benchmarks/attention.py`."""
    is_few = programs <= FEW_PROGRAMS
    if dim > 128:
        return (64, 4, 2) if programs > WIDE_MANY else (32, 4, 3 if is_few else 5)
    if programs >= MANY_PROGRAMS:
        return 64, 2, 3
    return (64, 2, 5) if is_few or uneven or dim <= 64 else (128, 4, 3)


def decode_attention(
    q: Tensor,
    cache: Tensor,
    decode: DecodeRows,
    window: int | None,
    scale: float,
    out: Tensor | Quantised,
    value_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> None:
    """Nothing here depends on lengths on the host, but for what `decode` says of them: a graph serves all others."""
    values, scales, out_rows = places_of(out)
    (rows, heads, head_dim), (_, page, _, kv_heads, _) = q.shape, cache.shape
    tables, splits = decode.tables, splits_of(rows, kv_heads, decode.uneven)
    dim = max(16, triton.next_power_of_2(head_dim))
    tokens, warps, stages = _shape_of(rows * kv_heads, dim, decode.uneven)
    tokens = min(tokens, _tile_bytes() // (dim * q.element_size()))
    if q.dtype == torch.float32:
        stages = min(stages, 2 if dim > 128 else 3)
    partial = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=q.device)
    peaks, totals = (torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    _decode[(kv_heads, rows, splits)](
        q, cache, tables, decode.slots, decode.positions, sinks, values, scales, partial, peaks, totals, q.stride(0),
        tables.stride(0), window or 0, scale, value_scale, out_rows, SINKS=sinks is not None, HEADS=heads,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE=page, SPLITS=splits,
        GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), DIM=dim, TOKENS=tokens, LARGEST=LARGEST,
        num_warps=warps, num_stages=stages_here(stages), launch_pdl=starts_early(),
    )  # fmt: skip
    if splits > 1:
        join_splits(partial, peaks, totals, q, out)


def join_splits(partial: Tensor, peaks: Tensor, totals: Tensor, q: Tensor, out: Tensor | Quantised) -> None:
    """What the queries attend, of the partial sums, peaks and totals of all stretches of their sequences."""
    (rows, heads, head_dim), splits, (values, scales, out_rows) = q.shape, partial.shape[2], places_of(out)
    dim = max(16, triton.next_power_of_2(head_dim))
    _join_splits[(rows * heads,)](
        partial, peaks, totals, q, values, scales, out_rows, HEADS=heads, HEAD_DIM=head_dim, SPLITS=splits, DIM=dim,
        LARGEST=LARGEST, num_warps=max(1, min(8, splits * dim // JOINED_AT_ONCE)), launch_pdl=starts_early(),
    )  # fmt: skip


def places_of(out: Tensor | Quantised) -> tuple[Tensor, Tensor | None, int]:
    """Where numbers go, where their scales do, and how far those of two heads are apart."""
    return (*out, out.scales.stride(1)) if isinstance(out, Quantised) else (out, None, 0)


@triton.jit
def _absorb(queries, keys, values, seen, acc, peak, total, scale, MASKED: tl.constexpr):
    """One block of keys and values into a running softmax. `scale` is for powers of 2."""
    scores = tl.dot(queries, keys, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(seen, scores, -1.0e30)
    top = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(peak - top)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def _sees(asked, position, window, WINDOWED: tl.constexpr):
    """Which of these key positions the queries at positions `asked` may look at."""
    allowed = position[None, :] <= asked[:, None]
    if WINDOWED:
        allowed &= position[None, :] > asked[:, None] - window
    return allowed


@triton.jit
def _attend_cached(
    queries, acc, peak, total, cache, table, asked, kv, lowest, oldest, highest, window, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Queries at positions `asked` against the cached keys from `lowest` to before `highest`.

    Those before `oldest` may be another's by now: they are not read.
    """
    d = tl.arange(0, DIM)
    inside = d < HEAD_DIM
    for at in range(lowest, highest, KEYS):
        position = at + tl.arange(0, KEYS)
        exists = (position >= oldest) & (position < highest)
        page = tl.load(table + position // PAGE, mask=exists, other=0).to(tl.int64)
        entry = (page * PAGE + position % PAGE) * 2 * KV_HEADS + kv
        keys = tl.load(cache + entry[None, :] * HEAD_DIM + d[:, None], mask=exists & inside[:, None], other=0.0)
        values = tl.load(cache + (entry + KV_HEADS)[:, None] * HEAD_DIM + d, mask=exists[:, None] & inside, other=0.0)
        seen = _sees(asked, position, window, WINDOWED) & exists
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        acc, peak, total = _absorb(queries, keys, values, seen, acc, peak, total, scale, MASKED)
    return acc, peak, total


@triton.jit
def _attend_block(
    queries, acc, peak, total, fresh, asked, row_of_zero, key_column, value_column, at, highest, window, scale,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """A block of keys that this step computed. With CUT it ends at `highest`: behind that another prompt may begin."""
    position = at + tl.arange(0, KEYS)
    keys = fresh.load([row_of_zero + at, key_column]).T
    values = fresh.load([row_of_zero + at, value_column])
    if CUT:
        values = tl.where((position < highest)[:, None], values, tl.zeros_like(values))
    seen = _sees(asked, position, window, WINDOWED)
    return _absorb(queries, keys, values, seen, acc, peak, total, scale, MASKED)


@triton.jit
def _attend_fresh(
    queries, acc, peak, total, fresh, asked, row_of_zero, key_column, value_column, lowest, highest, window, scale,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The same against keys that this step computed: they lie row by row in `fresh`, position 0 at `row_of_zero`.

    Blocks are whole, but for the last one with MASKED. Tensor cores take the values of whole ones as they lie.
    """
    LIES: tl.constexpr = MASKED and queries.dtype != tl.float32
    whole = lowest + (highest - lowest) // KEYS * KEYS if LIES else highest
    for at in range(lowest, whole, KEYS):
        acc, peak, total = _attend_block(
            queries, acc, peak, total, fresh, asked, row_of_zero, key_column, value_column, at, highest, window, scale,
            KEYS, WINDOWED, MASKED, MASKED and not LIES,
        )  # fmt: skip
    if LIES and whole < highest:
        acc, peak, total = _attend_block(
            queries, acc, peak, total, fresh, asked, row_of_zero, key_column, value_column, whole, highest, window,
            scale, KEYS, WINDOWED, MASKED, True,
        )  # fmt: skip
    return acc, peak, total


@triton.jit(do_not_specialize=["out_rows"])
def _prefill(
    qkv, fresh, cache, tables, tiles, sinks, out, out_scales, stride, table_width, window, scale, value_scale, out_rows,
    SINKS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, FRESH: tl.constexpr, CACHED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One head of a tile of queries: first the keys that all of them see, then those around the diagonal.

    With FRESH, only what earlier steps computed comes from the cache; without CACHED, nothing does.
    """
    let_next_start()
    tile, head = tiles + tl.program_id(1) // PARTS * 5, tl.program_id(0)
    skipped = tl.program_id(1) % PARTS * ROWS
    wait_for_ahead()
    sequence, first, count = tl.load(tile), tl.load(tile + 1) + skipped, tl.load(tile + 2) - skipped
    start, begins = tl.load(tile + 3) + skipped, tl.load(tile + 4)
    if PARTS > 1:
        if count <= 0:
            return
        count = tl.minimum(count, ROWS)
    kv = head // (HEADS // KV_HEADS)
    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    mask = (r[:, None] < count) & (d < HEAD_DIM)
    row = (first + r).to(tl.int64)[:, None]
    queries = to_meet(tl.load(qkv + row * stride + head * HEAD_DIM + d, mask=mask, other=0.0), cache)
    table = tables + sequence.to(tl.int64) * table_width
    oldest = tl.maximum(start - window + 1, 0) if WINDOWED else 0
    peak = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        peak = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([ROWS, DIM], tl.float32)
    if CACHED:
        lowest = oldest // KEYS * KEYS
        highest = begins if FRESH else start + count
        whole = lowest if WINDOWED else tl.minimum(start + 1, highest) // KEYS * KEYS
        acc, peak, total = _attend_cached(
            queries, acc, peak, total, cache, table, start + r, kv, lowest, oldest, whole, window, scale,
            KV_HEADS, HEAD_DIM, PAGE, DIM, KEYS, WINDOWED, False,
        )  # fmt: skip
        acc, peak, total = _attend_cached(
            queries, acc, peak, total, cache, table, start + r, kv, whole, oldest, highest, window, scale,
            KV_HEADS, HEAD_DIM, PAGE, DIM, KEYS, WINDOWED, True,
        )  # fmt: skip
    if FRESH:
        lowest = begins + tl.maximum(oldest - begins, 0) // KEYS * KEYS
        whole = lowest if WINDOWED else start
        key_column, value_column = (HEADS + kv) * HEAD_DIM, (HEADS + KV_HEADS + kv) * HEAD_DIM
        acc, peak, total = _attend_fresh(
            queries, acc, peak, total, fresh, start + r, first - start, key_column, value_column, lowest, whole,
            window, scale, KEYS, WINDOWED, False,
        )  # fmt: skip
        acc, peak, total = _attend_fresh(
            queries, acc, peak, total, fresh, start + r, first - start, key_column, value_column, whole, start + count,
            window, scale, KEYS, WINDOWED, True,
        )  # fmt: skip
    if cache.dtype.element_ty.is_fp8():
        acc *= value_scale
    scale_place = head.to(tl.int64) * out_rows + first + r
    place, attended = row * (HEADS * HEAD_DIM) + head * HEAD_DIM + d, acc / total[:, None]
    _store_heads(out, out_scales, attended, place, scale_place, mask, r < count, qkv, LARGEST)


def prefill_attention(
    qkv: Tensor,
    heads: int,
    cache: Tensor,
    tiles: PrefillTiles,
    window: int | None,
    scale: float,
    out: Tensor | Quantised,
    value_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> None:
    """Keys and values of this step come straight from qkv where that holds what the cache does, others by their pages.

    A tile of qkv is one copy if a head fills it.
    """
    values, scales, out_rows = places_of(out)
    (tokens, _, head_dim), (_, page, _, kv_heads, _) = qkv.shape, cache.shape
    dim = max(16, triton.next_power_of_2(head_dim))
    wide, head_bytes = qkv.dtype == torch.float32, dim * qkv.element_size()
    rows = min(PROMPT_TILE, _tile_bytes() // head_bytes)
    keys = min(32 if wide else KEYS_AT_ONCE, _tile_bytes() // 2 // head_bytes)
    as_cached = dim == head_dim and cache.dtype == qkv.dtype
    fresh = TensorDescriptor.from_tensor(qkv.view(tokens, -1), [keys, dim]) if as_cached else None
    parts = PROMPT_TILE // rows
    _prefill[(heads, len(tiles.tiles) * parts)](
        qkv, fresh, cache, tiles.tables, tiles.tiles, sinks, values, scales, qkv.stride(0), tiles.tables.stride(0),
        window or 0, scale * 1.4426950408889634, value_scale, out_rows, SINKS=sinks is not None, HEADS=heads,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE=page, DIM=dim,
        ROWS=rows, PARTS=parts, KEYS=keys, WINDOWED=window is not None, FRESH=as_cached,
        CACHED=tiles.resumed or not as_cached, LARGEST=LARGEST, num_warps=8 if wide else 4, num_stages=1 if wide else 2,
        launch_pdl=starts_early(),
    )  # fmt: skip
