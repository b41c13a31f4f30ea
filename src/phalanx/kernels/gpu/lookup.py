"""`kernels.lookup` on a GPU, one launch each: a decode step is so short that a handful of small ones shows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "positions"])
def _look_up(
    kept, latest, latest_at, tables, slots, positions, tokens, places, rows, group_stride, slot_stride,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    slot, position = tl.load(slots + row, mask=exists, other=0), tl.load(positions + row, mask=exists, other=0)
    entry = tables + slot * slot_stride + position // PAGE
    for group in tl.static_range(1, GROUPS):
        block = tl.load(entry + group * group_stride, mask=exists, other=0).to(tl.int64)
        tl.store(places + group * rows + row, block * PAGE + position % PAGE, mask=exists)
    place = tl.load(entry, mask=exists, other=0).to(tl.int64) * PAGE + position % PAGE
    tl.store(places + row, place, mask=exists)
    is_latest = tl.load(latest_at + slot, mask=exists, other=0) == position
    token = tl.load(latest + slot, mask=exists & is_latest, other=0)
    token = tl.where(is_latest, token, tl.load(kept + place, mask=exists & (is_latest == 0), other=0))
    tl.store(kept + place, token, mask=exists)
    tl.store(tokens + row, token, mask=exists)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "positions"])
def _tokens_at(kept, tables, slots, positions, tokens, rows, slot_stride, PAGE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    slot, position = tl.load(slots + row, mask=exists, other=0), tl.load(positions + row, mask=exists, other=0)
    block = tl.load(tables + slot * slot_stride + position // PAGE, mask=exists, other=0).to(tl.int64)
    tl.store(tokens + row, tl.load(kept + block * PAGE + position % PAGE, mask=exists, other=0), mask=exists)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "positions"])
def _keep_sampled(latest, latest_at, slots, positions, tokens, rows, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    slot = tl.load(slots + row, mask=exists, other=0)
    is_last = exists & (tl.load(slots + row + 1, mask=row + 1 < rows, other=-1) != slot)
    tl.store(latest + slot, tl.load(tokens + row, mask=exists, other=0), mask=is_last)
    tl.store(latest_at + slot, tl.load(positions + row, mask=exists, other=0), mask=is_last)


@triton.jit
def _take_in(tables, sampling, kept, latest_at, news, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first, second, third, last = tl.load(news), tl.load(news + 1), tl.load(news + 2), tl.load(news + 3)
    exists = row < last
    place, number = tl.load(news + 4 + row, mask=exists, other=0), tl.load(news + 4 + last + row, mask=exists, other=0)
    tl.store(tables + place, number, mask=row < first)
    tl.store(sampling + place, number, mask=(row >= first) & (row < second))
    tl.store(kept + place, number, mask=(row >= second) & (row < third))
    tl.store(latest_at + place, number, mask=(row >= third) & exists)


def look_up(
    kept: Tensor, latest: Tensor, latest_at: Tensor, tables: Tensor, slots: Tensor, positions: Tensor, page: int
) -> tuple[Tensor, Tensor]:
    rows, groups = len(slots), len(tables)
    tokens = torch.empty(rows, dtype=kept.dtype, device=kept.device)
    places = torch.empty(groups, rows, dtype=torch.int64, device=kept.device)
    _look_up[(triton.cdiv(rows, _ROWS),)](
        kept, latest, latest_at, tables, slots, positions, tokens, places, rows, tables.stride(0), tables.stride(1),
        GROUPS=groups, PAGE=page, ROWS=_ROWS,
    )  # fmt: skip
    return tokens, places


def tokens_at(kept: Tensor, tables: Tensor, slots: Tensor, positions: Tensor, page: int) -> Tensor:
    tokens = torch.empty_like(positions)
    _tokens_at[(triton.cdiv(len(tokens), _ROWS),)](
        kept, tables, slots, positions, tokens, len(tokens), tables.stride(0), PAGE=page, ROWS=_ROWS
    )
    return tokens


def keep_sampled(latest: Tensor, latest_at: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    rows = len(slots)
    _keep_sampled[(triton.cdiv(rows, _ROWS),)](latest, latest_at, slots, positions, tokens, rows, ROWS=_ROWS)


def take_in(tables: Tensor, sampling: Tensor, kept: Tensor, latest_at: Tensor, news: Tensor, most: int) -> None:
    _take_in[(triton.cdiv(most, _ROWS),)](tables, sampling, kept, latest_at, news, ROWS=_ROWS)
