"""What a token leaves for compressed attention: its vector, entries that it completes, and rings of the last tokens.

Every token of a step is a row; those of a sequence lie one behind the other. So a token so many positions further back
is in as many rows before, if the slot and the position there say so, and in the sequence's ring otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead
from phalanx.kernels.tiling import DecodeRows

HEADS_AT_ONCE = 8
COLUMNS_AT_ONCE = 1024
NUMBERS_AT_ONCE = 8192
"""Values that a program holds of the tokens of an entry, and as many gates."""


@triton.jit
def _turned(x, cos, sin, sign, WIDTH: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr):
    """The last dimensions of each head rotated, whose pairs lie side by side; `cos` and `sin` are the token's."""
    first, second = tl.split(tl.reshape(x.to(tl.float32), (HEADS, WIDE // 2, 2)))
    pair = tl.arange(0, WIDE // 2)[None, :] - (WIDTH - ROPE) // 2
    turns = (pair >= 0) & (pair < ROPE // 2)
    near = tl.load(cos + pair, mask=turns, other=1.0).to(tl.float32)
    far = tl.load(sin + ROPE // 2 + pair, mask=turns, other=0.0).to(tl.float32) * sign
    both = tl.join(first * near - second * far, second * near + first * far)
    return tl.reshape(both, (HEADS, WIDE)).to(x.dtype)


@triton.jit
def _normed(x, weight, d, eps, WIDTH: tl.constexpr, WEIGHED: tl.constexpr):
    """Rows of x, of which numbers beyond WIDTH are zero."""
    wide = x.to(tl.float32)
    shrink = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    if WEIGHED:
        factor = tl.load(weight + d, mask=d < WIDTH, other=0.0)
        normed = wide * shrink if factor.dtype == tl.float32 else (wide * shrink).to(x.dtype)
        normed = factor * normed
    else:
        normed = wide * shrink.to(x.dtype).to(tl.float32)
    return normed.to(x.dtype)


@triton.jit
def _norm_and_turn(
    x, weight, cos, sin, out, by_token, by_head, heads, eps, sign, NORMED: tl.constexpr, WEIGHED: tl.constexpr,
    WIDTH: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Some heads of one token."""
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    head, d = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, WIDE)[None, :]
    mask = (head < heads) & (d < WIDTH)
    wait_for_ahead()
    values = tl.load(x + token * by_token + head * by_head + d, mask=mask, other=0.0)
    if NORMED:
        values = _normed(values, weight, d, eps, WIDTH, WEIGHED)
    values = _turned(values, cos + token * ROPE, sin + token * ROPE, sign, WIDTH, ROPE, HEADS, WIDE)
    tl.store(out + (token * heads + head) * WIDTH + d, values, mask=mask)


def _turn(
    x: Tensor, turns: tuple[Tensor, Tensor], sign: float, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    (tokens, heads, width), (cos, sin) = x.shape, turns
    out = x.new_empty(x.shape)
    at_once = min(HEADS_AT_ONCE, triton.next_power_of_2(heads))
    _norm_and_turn[(tokens, triton.cdiv(heads, at_once))](
        x, weight, cos, sin, out, x.stride(0), x.stride(1), heads, eps or 0.0, sign, NORMED=eps is not None,
        WEIGHED=weight is not None, WIDTH=width, ROPE=cos.shape[-1], HEADS=at_once, WIDE=triton.next_power_of_2(width),
        launch_pdl=starts_early(),
    )  # fmt: skip
    return out


def norm_and_turn(x: Tensor, weight: Tensor | None, eps: float, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Each head of x, [tokens, heads, width], normed, and its last dimensions turned."""
    return _turn(x, turns, 1.0, weight, eps)


def turn(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    return _turn(x, turns, 1.0)


def turn_back(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    return _turn(x, turns, -1.0)


@triton.jit
def kept_of(new, ring, slots, positions, row, slot, position, known, RING: tl.constexpr, WIDTH: tl.constexpr):
    """Where what is kept of the tokens at `position` begins, which are those of `row` if they are of this step."""
    near = known & (row >= 0)
    fresh = near & (tl.load(slots + row, mask=near, other=-1) == slot)
    fresh = fresh & (tl.load(positions + row, mask=near, other=-1) == position)
    return tl.where(fresh, new + row * WIDTH, ring + (slot * RING + position % RING) * WIDTH)


@triton.jit
def place_of(table, number, known, table_width, RATIO: tl.constexpr, PAGE: tl.constexpr, ROOM: tl.constexpr):
    """Of entries of these numbers, in the flattened cache: each in the block of the token that completes it."""
    last = number * RATIO + (RATIO - 1)
    page = tl.load(table + tl.minimum(last // PAGE, table_width - 1), mask=known, other=0).to(tl.int64)
    return page * ROOM + last % PAGE // RATIO


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _compress(
    inputs, ring, bias, weight, cos, sin, entries, tables, slots, positions, table_width, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RATIO: tl.constexpr, SPAN: tl.constexpr, ROPE: tl.constexpr,
    PAGE: tl.constexpr, ROOM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The entry that a token completes, if it does: a running softmax over the gates of its tokens, by columns."""
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    wait_for_ahead()
    position, slot = tl.load(positions + row), tl.load(slots + row).to(tl.int64)
    if (position + 1) % RATIO != 0:
        return
    d = tl.arange(0, WIDE)[None, :]
    inside = d < WIDTH
    peak = tl.full([WIDE], -1.0e30, tl.float32)
    total, acc = tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32)
    for first in range(0, SPAN, TOKENS):
        number = first + tl.arange(0, TOKENS)
        back = SPAN - 1 - number
        known = (number < SPAN) & (back <= position)
        base = kept_of(inputs, ring, slots, positions, row - back, slot, position - back, known, SPAN, 2 * COLUMNS)
        column = d + tl.where(number < SPAN - RATIO, 0, COLUMNS - WIDTH)[:, None]
        mask = known[:, None] & inside
        value = tl.load(base[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(base[:, None] + COLUMNS + column, mask=mask, other=0.0).to(tl.float32)
        gate += tl.load(bias + (number % RATIO)[:, None] * COLUMNS + column, mask=mask, other=0.0).to(tl.float32)
        gate = tl.where(mask, gate, -1.0e30)
        top = tl.maximum(peak, tl.max(gate, 0))
        share, shrink = tl.exp(gate - top[None, :]), tl.exp(peak - top)
        total = total * shrink + tl.sum(share, 0)
        acc = acc * shrink + tl.sum(share * value, 0)
        peak = top
    made = tl.where(inside, (acc / total)[None, :], 0.0).to(entries.dtype.element_ty)
    made = _normed(made, weight, d, eps, WIDTH, True)
    made = _turned(made, cos + row * ROPE, sin + row * ROPE, 1.0, WIDTH, ROPE, 1, WIDE)
    place = place_of(tables + slot * table_width, position // RATIO, True, table_width, RATIO, PAGE, ROOM)
    tl.store(entries + place * WIDTH + d, made, mask=inside)


def compress(
    inputs: Tensor, ring: Tensor, bias: Tensor, weight: Tensor, eps: float, turns: tuple[Tensor, Tensor],
    entries: Tensor, rows: DecodeRows, block_size: int,
) -> None:  # fmt: skip
    """Entries that these rows complete, normed and turned, into their places in `entries`.

    `turns` are those of every row's entry, as if it completed one. `ring` has what entries are made from of tokens
    before this step.
    """
    (ratio, columns), width, span = bias.shape, entries.shape[-1], ring.shape[1]
    wide = triton.next_power_of_2(width)
    _compress[(len(inputs),)](
        inputs, ring, bias, weight, *turns, entries, rows.tables, rows.slots, rows.positions, rows.tables.stride(0),
        eps, WIDTH=width, COLUMNS=columns, RATIO=ratio, SPAN=span, ROPE=turns[0].shape[-1], PAGE=block_size,
        ROOM=entries.shape[1], WIDE=wide, TOKENS=min(triton.next_power_of_2(span), max(1, NUMBERS_AT_ONCE // wide)),
        num_warps=8 if wide > 128 else 4, launch_pdl=starts_early(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "positions"])
def _remember(new, ring, slots, positions, rows, WIDTH: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr):
    """Unless a later row of the sequence has the same place there."""
    let_next_start()
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    later = row + RING
    wait_for_ahead()
    slot, position = tl.load(slots + row), tl.load(positions + row)
    same = tl.load(slots + later, mask=later < rows, other=-1) == slot
    if same & (tl.load(positions + later, mask=later < rows, other=-1) == position + RING):
        return
    place = slot.to(tl.int64) * RING + position % RING
    tl.store(ring + place * WIDTH + d, tl.load(new + row * WIDTH + d, mask=d < WIDTH, other=0.0), mask=d < WIDTH)


def remember(ring: Tensor, new: Tensor, rows: DecodeRows) -> None:
    """Put what is new, [tokens, width], into the rings of the sequences, of each as much as has room."""
    tokens, width = new.shape
    block = min(COLUMNS_AT_ONCE, triton.next_power_of_2(width))
    _remember[(tokens, triton.cdiv(width, block))](
        new, ring, rows.slots, rows.positions, tokens, WIDTH=width, RING=ring.shape[1], BLOCK=block,
        launch_pdl=starts_early(),
    )  # fmt: skip
