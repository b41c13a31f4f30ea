"""Latent attention of rows of one token, for Hopper: pages of the cache stream through shared memory by bulk copies.

What was cached before this step is on its way before the kernel ahead has ended. This is Gluon, as `stream` is.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from phalanx.kernels.gpu.stream import all_threads, copy_in, multiprocessors

RANK, ROPE, PAGE = 512, 64, 16
"""Of the latents that this kernel attends: those of DeepSeek, Kimi and GLM, in pages as the engine keeps them."""

TOKENS = 64
"""Of a block: the fewest rows that the tensor cores take."""

STAGES = 2
"""Blocks for which there is room beside the queries."""

MOST_HEADS = 32
WARPS = 4

ASIDE = 16
"""Tokens before a row's own that kernels not yet ended may still write: more than are drafted in a step."""

_RANK, _ROPE, _PAGE, _TOKENS = (gl.constexpr(size) for size in (RANK, ROPE, PAGE, TOKENS))
_PAGES, _BLOCK_BYTES = gl.constexpr(TOKENS // PAGE), gl.constexpr(TOKENS * (RANK + ROPE) * 2)
_ASIDE, _STAGES, _PIECE = gl.constexpr(ASIDE), gl.constexpr(STAGES), gl.constexpr(128)


@gluon.jit
def _copy_block(latents, keys, pages, latent, key, full, pred):
    """The pages of a block."""
    mbarrier.expect(full, _BLOCK_BYTES, pred=pred)
    for number in gl.static_range(_PAGES):
        first = pages[number] * _PAGE
        copy_in(latents, [first, 0], full, latent.slice(number * _PAGE, _PAGE, 0), pred=pred)
        copy_in(keys, [first, _RANK], full, key.slice(number * _PAGE, _PAGE, 0), pred=pred)


@gluon.jit
def _pages_of(table, at, last):
    """The pages of the block that begins at a token; behind the last token, the last page again."""
    first = at // _PAGE
    end = last // _PAGE
    return (
        gl.load(table + gl.minimum(first, end)),
        gl.load(table + gl.minimum(first + 1, end)),
        gl.load(table + gl.minimum(first + 2, end)),
        gl.load(table + gl.minimum(first + 3, end)),
    )


@gluon.jit
def _turned(q, cos, sin, row, HEADS: gl.constexpr, NOPE: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """The rotated part of a row's queries, [COLUMNS, ROPE]."""
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    column, r = gl.arange(0, COLUMNS, gl.SliceLayout(1, spread)), gl.arange(0, _ROPE, gl.SliceLayout(0, spread))
    other = (r + _ROPE // 2) % _ROPE
    known = (column < HEADS)[:, None]
    start = q + (row * HEADS + column)[:, None] * (NOPE + _ROPE) + NOPE
    straight = gl.load(start + r[None, :], mask=known, other=0.0)
    across = gl.load(start + other[None, :], mask=known, other=0.0)
    near, far = gl.load(cos + row * _ROPE + r).to(gl.float32), gl.load(sin + row * _ROPE + r).to(gl.float32)
    rotated = straight.to(gl.float32) * near[None, :] + across.to(gl.float32) * far[None, :]
    return rotated.to(straight.dtype)


@gluon.jit
def _stretch(position, split, SPLITS: gl.constexpr):
    """Where a program begins, and where it stops: behind the last token, or where the next one begins."""
    reach = position + 1
    share = gl.cdiv(gl.cdiv(reach, _TOKENS), SPLITS) * _TOKENS
    begin = split * share
    return begin, gl.minimum(begin + share, reach)


@gluon.jit
def _clear(latent, first, WARPS: gl.constexpr):
    """Zeros in the rows of a block from `first` on: 0 times what a request that broke has left there is NaN.

    In pieces for which there are registers beside all sums.
    """
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    row = gl.arange(0, _PAGE, gl.SliceLayout(1, spread))
    for number in gl.static_range(_PAGES):
        if first < (number + 1) * _PAGE:
            kept = (number * _PAGE + row < first)[:, None]
            for start in gl.static_range(0, _RANK, _PIECE):
                piece = latent.slice(number * _PAGE, _PAGE, 0).slice(start, _PIECE, 1)
                held = piece.load(spread)
                piece.store(gl.where(kept, held, gl.zeros_like(held)))
    fence_async_shared()
    all_threads()


@gluon.jit(do_not_specialize=["table_rows"], do_not_specialize_on_alignment=["slots", "positions"])
def attend_latents(
    latents, keys, brought, q, cos, sin, tables, slots, positions, out, partial, peaks, totals, table_rows, table_width,
    table_pages, scale, HEADS: gl.constexpr, NOPE: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """All heads of a token against one stretch of what it looks at, as `latent._attend_latents` does it.

    Slots and positions are read before the kernel ahead has ended, and blocks that end well before the position
    are asked for. If then they turn out to be others, which is so only where this step computes them, all begins anew.
    """
    COLUMNS: gl.constexpr = brought.block_shape[0]
    dtype: gl.constexpr = brought.dtype
    ACROSS: gl.constexpr = WARPS // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, COLUMNS // ACROSS, 16])
    tall: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    by_token: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    by_head: gl.constexpr = gl.SliceLayout(0, tall)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * COLUMNS, element_bitwidth=16, rank=2)
    cuda.gdc_launch_dependents()
    row, split = gl.program_id(0).to(gl.int64), gl.program_id(1)
    slot, position = gl.load(slots + row).to(gl.int32), gl.load(positions + row).to(gl.int32)

    latent_stages = gl.allocate_shared_memory(dtype, [_STAGES, _TOKENS, _RANK], swizzled)
    key_stages = gl.allocate_shared_memory(dtype, [_STAGES, _TOKENS, _ROPE], swizzled)
    low = gl.allocate_shared_memory(dtype, [COLUMNS, _RANK], swizzled)
    high = gl.allocate_shared_memory(dtype, [COLUMNS, _ROPE], swizzled)
    weight_tile = gl.allocate_shared_memory(dtype, [_TOKENS, COLUMNS], narrow)
    filled = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(filled.index(i), count=1)
    mbarrier.init(asked, count=1)
    fence_async_shared()

    table = tables + gl.minimum(gl.maximum(slot, 0), table_rows - 1).to(gl.int64) * table_width
    guess = gl.minimum(gl.maximum(position, 0), table_pages * _PAGE - 1)
    begin, stop = _stretch(guess, split, SPLITS)
    safe = gl.minimum(guess + 1 - gl.num_programs(0) - _ASIDE, stop)
    near, far = _pages_of(table, begin, guess), _pages_of(table, begin + _TOKENS, guess)
    near_safe, far_safe = begin + _TOKENS <= safe, begin + 2 * _TOKENS <= safe
    _copy_block(latents, keys, near, latent_stages.index(0), key_stages.index(0), filled.index(0), near_safe)
    _copy_block(latents, keys, far, latent_stages.index(1), key_stages.index(1), filled.index(1), far_safe)

    cuda.gdc_wait()
    mbarrier.expect(asked, COLUMNS * _RANK * 2)
    copy_in(brought, [(row * HEADS).to(gl.int32), 0], asked, low)
    slot_now = gl.load(slots + row, volatile=True).to(gl.int32)
    position_now = gl.load(positions + row, volatile=True).to(gl.int32)
    near_late, far_late = (near_safe == 0) & (begin < stop), (far_safe == 0) & (begin + _TOKENS < stop)
    _copy_block(latents, keys, near, latent_stages.index(0), key_stages.index(0), filled.index(0), near_late)
    _copy_block(latents, keys, far, latent_stages.index(1), key_stages.index(1), filled.index(1), far_late)
    high.store(_turned(q, cos, sin, row, HEADS, NOPE, COLUMNS, WARPS))
    fence_async_shared()
    turn = 0
    if (slot_now != slot) | (position_now != position):
        never, far_never = begin >= stop, begin + _TOKENS >= stop
        _copy_block(latents, keys, near, latent_stages.index(0), key_stages.index(0), filled.index(0), never)
        _copy_block(latents, keys, far, latent_stages.index(1), key_stages.index(1), filled.index(1), far_never)
        for i in gl.static_range(_STAGES):
            mbarrier.wait(filled.index(i), 0)
        turn = 1
        table = tables + slot_now.to(gl.int64) * table_width
        guess = position_now
        begin, stop = _stretch(guess, split, SPLITS)
        for i in gl.static_range(_STAGES):
            pages = _pages_of(table, begin + i * _TOKENS, guess)
            stage, key_stage, wanted = latent_stages.index(i), key_stages.index(i), begin + i * _TOKENS < stop
            _copy_block(latents, keys, pages, stage, key_stage, filled.index(i), wanted)

    column = gl.arange(0, COLUMNS, by_column)
    peak = gl.full([COLUMNS], float("-inf"), gl.float32, by_column)
    total = gl.zeros([_TOKENS, COLUMNS], gl.float32, layout)
    acc = gl.zeros([_RANK, COLUMNS], gl.float32, tall)
    count = gl.cdiv(gl.maximum(stop - begin, 0), _TOKENS)
    mbarrier.wait(asked, 0)
    all_threads()
    for i in range(count):
        at = begin + i * _TOKENS
        stage, full = i % _STAGES, filled.index(i % _STAGES)
        latent, key = latent_stages.index(stage), key_stages.index(stage)
        pages = _pages_of(table, at + _STAGES * _TOKENS, guess)
        mbarrier.wait(full, (i // _STAGES + turn) & 1)
        if at + _TOKENS > stop:
            _clear(latent, stop - at, WARPS)
        none = gl.zeros([_TOKENS, COLUMNS], gl.float32, layout)
        scores = warpgroup_mma(latent, low.permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma(key, high.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        seen = at + gl.arange(0, _TOKENS, by_token) < stop
        scores = gl.where(seen[:, None], scores * scale, -1.0e30)
        top = gl.maximum(peak, gl.max(scores, 0))
        weights = gl.exp2(scores - top[None, :])
        shrink = gl.exp2(peak - top)
        peak = top
        total = total * shrink[None, :] + weights
        weight_tile.store(weights.to(dtype))
        fence_async_shared()
        all_threads()
        acc *= gl.convert_layout(shrink, by_head)[None, :]
        acc = warpgroup_mma(latent.permute((1, 0)), weight_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        all_threads()
        _copy_block(latents, keys, pages, latent, key, full, i + _STAGES < count)
    sums = gl.sum(total, 0)

    if SPLITS == 1:
        spread: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [1, WARPS], [0, 1])
        result = gl.convert_layout((acc * gl.convert_layout(1.0 / sums, by_head)[None, :]).to(dtype), spread)
        wide = gl.arange(0, _RANK, gl.SliceLayout(1, spread))
        head = gl.arange(0, COLUMNS, gl.SliceLayout(0, spread))
        where = out + (row * HEADS + head)[None, :] * _RANK + wide[:, None]
        gl.store(where, result, mask=(head < HEADS)[None, :] & (wide < _RANK)[:, None])
    else:
        spot = (row * HEADS + column) * SPLITS + split
        gl.store(peaks + spot, peak, mask=column < HEADS)
        gl.store(totals + spot, sums, mask=column < HEADS)
        if count > 0:
            rank, head = gl.arange(0, _RANK, gl.SliceLayout(1, tall)), gl.arange(0, COLUMNS, by_head)
            where = partial + ((row * HEADS + head) * SPLITS + split)[None, :] * _RANK + rank[:, None]
            gl.store(where, acc, mask=(head < HEADS)[None, :] & (rank < _RANK)[:, None])


def _swizzled(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(matrix, block, layout)


def attends(q: Tensor, rank: int, rope: int, cache: Tensor) -> bool:
    """On a GPU that has the instructions, latents of the usual size."""
    is_half = q.dtype in (torch.bfloat16, torch.float16) and q.dtype == cache.dtype
    sizes = q.shape[1] <= MOST_HEADS and (rank, rope, cache.shape[1]) == (RANK, ROPE, PAGE)
    return q.device.type == "cuda" and multiprocessors(q.device) > 0 and is_half and sizes


def attend(
    brought: Tensor, q: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, tables: Tensor, slots: Tensor,
    positions: Tensor, scale: float, out: Tensor, partial: Tensor | None, peaks: Tensor, totals: Tensor, splits: int,
) -> None:  # fmt: skip
    """As `latent.decode_latents`, but for the joining of parts."""
    heads, places = q.shape[1], cache.view(-1, RANK + ROPE)
    attend_latents[(len(positions), splits)](
        _swizzled(places, [PAGE, RANK]), _swizzled(places, [PAGE, ROPE]),
        _swizzled(brought.view(-1, RANK), [max(16, triton.next_power_of_2(heads)), RANK]), q, cos, sin, tables, slots,
        positions, out, partial, peaks, totals, tables.shape[0], tables.stride(0), tables.shape[1],
        scale * 1.4426950408889634, HEADS=heads, NOPE=q.shape[2] - ROPE, SPLITS=splits, WARPS=WARPS, num_warps=WARPS,
        launch_pdl=True,
    )  # fmt: skip


UNIT = 64
"""Numbers in 128 bytes, as wide as shared memory is swizzled."""

ROWS_AT_ONCE = 128
MOST_INPUTS = 512
FEW_ROWS, STEP = 32, 128
"""With few rows, all inputs are waited for at once, with more step by step."""


@gluon.jit(do_not_specialize=["rows"])
def stream_by_heads(
    matrices, xs, out, rows, matrix_head, x_head, out_row, out_head, STEPS: gl.constexpr, BY_OUTPUTS: gl.constexpr
):
    """Some outputs of one head for some rows, [OUTPUTS, ROWS].

    The head's matrix, which lies by outputs or by inputs, is on its way before the kernel ahead has ended.
    """
    OUTPUTS: gl.constexpr = matrices.block_shape[0 if BY_OUTPUTS else 1]
    ROWS: gl.constexpr = xs.block_shape[0]
    STEP: gl.constexpr = xs.block_shape[1]
    BYTES: gl.constexpr = (OUTPUTS + ROWS) * STEP * 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    cuda.gdc_launch_dependents()
    head, output, row = gl.program_id(0), gl.program_id(1) * OUTPUTS, gl.program_id(2) * ROWS
    HEIGHT: gl.constexpr = matrices.block_shape[0]
    WIDTH: gl.constexpr = matrices.block_shape[1]
    matrix_steps = gl.allocate_shared_memory(matrices.dtype, [STEPS, HEIGHT, WIDTH], matrices.layout)
    x_steps = gl.allocate_shared_memory(xs.dtype, [STEPS, ROWS, STEP], xs.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STEPS):
        mbarrier.init(filled.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STEPS):
        mbarrier.expect(filled.index(i), BYTES)
        if BY_OUTPUTS:
            copy_in(matrices, [head * matrix_head + output, i * STEP], filled.index(i), matrix_steps.index(i))
        else:
            copy_in(matrices, [head * matrix_head + i * STEP, output], filled.index(i), matrix_steps.index(i))
    cuda.gdc_wait()
    for i in gl.static_range(STEPS):
        copy_in(xs, [row, head * x_head + i * STEP], filled.index(i), x_steps.index(i))
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    for i in gl.static_range(STEPS):
        mbarrier.wait(filled.index(i), 0)
        matrix = matrix_steps.index(i) if BY_OUTPUTS else matrix_steps.index(i).permute((1, 0))
        acc = warpgroup_mma(matrix, x_steps.index(i).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    spread: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    made = gl.convert_layout(acc.to(out.dtype.element_ty), spread)
    column = output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, spread))
    token = row + gl.arange(0, ROWS, gl.SliceLayout(0, spread))
    where = out + token.to(gl.int64)[None, :] * out_row + head * out_head + column[:, None]
    gl.store(where, made, mask=(token < rows)[None, :] & (column >= 0)[:, None])


def multiplies(x: Tensor, matrices: Tensor, out: Tensor) -> bool:
    """On a GPU that has the instructions, matrices that can be copied in bulk and fit into shared memory."""
    if x.device.type != "cuda" or not multiprocessors(x.device) or x.element_size() != 2 or x.dtype != matrices.dtype:
        return False
    by_head, near, far = matrices.stride(0), *sorted(matrices.stride()[1:])
    whole = x.shape[2] % UNIT == 0 and out.shape[2] % UNIT == 0 and x.shape[2] <= MOST_INPUTS
    in_rows = near == x.stride(2) == out.stride(2) == 1 and by_head % far == 0
    aligned = all(size % 8 == 0 for size in (far, *x.stride()[:2])) and (x.data_ptr() | matrices.data_ptr()) % 16 == 0
    return whole and in_rows and aligned


def by_heads(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    (rows, heads, inputs), outputs = x.shape, out.shape[2]
    by_head, by_input, by_output = matrices.stride()
    is_by_outputs, apart = by_input == 1, max(by_input, by_output)
    step = min(inputs & -inputs, MOST_INPUTS if rows <= FEW_ROWS else STEP)  # a power of two that divides them
    inner, block = (outputs, [UNIT, step]) if is_by_outputs else (inputs, [step, UNIT])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    matrix_head, width = by_head // apart, inputs if is_by_outputs else outputs
    table = TensorDescriptor(matrices, [(heads - 1) * matrix_head + inner, width], [apart, 1], block, layout)
    height = min(ROWS_AT_ONCE, max(8, triton.next_power_of_2(rows)))
    x_row, x_head = x.stride()[:2]
    xs = TensorDescriptor(x, [rows, (heads - 1) * x_head + inputs], [x_row, 1], [height, step], layout)
    stream_by_heads[(heads, outputs // UNIT, triton.cdiv(rows, height))](
        table, xs, out, rows, matrix_head, x_head, *out.stride()[:2], STEPS=inputs // step, BY_OUTPUTS=is_by_outputs,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
