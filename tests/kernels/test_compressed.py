"""Rings and entries of compressed attention: what a token looks back on, however its sequence is cut and placed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.kernels.attention import AttentionBatch, PrefillRow
from phalanx.kernels.compressed import Rows, closing, far, line, near, remember, room, sources, tiles, together
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt
from tests.kernels.apart import run_apart

WIDTH = 3


@pytest.mark.slow
def test_the_kernels_compute_as_defined() -> None:
    """In Triton's interpreter."""
    run_apart("interpreted_compressed")


def rows_of(place: int, start: int, count: int) -> Rows:
    number = torch.arange(count)[None]
    return Rows(number, number + start, start + count, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([place]))


@given(
    size=st.integers(1, 9),
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    place=st.integers(0, 2),
)
def test_a_line_is_the_history_whatever_was_in_the_place(size: int, chunks: list[int], place: int) -> None:
    """As far as the ring goes back, with zeros before the first token; other places stay as they were."""
    ring = torch.full((3, size, WIDTH), float("nan"))
    history = torch.randn(sum(chunks), WIDTH)
    padded = torch.cat((torch.zeros(size - 1, WIDTH), history))
    start = 0
    for count in chunks:
        new, rows = history[start : start + count], rows_of(place, start, count)
        assert torch.equal(line(ring, new, rows)[0], padded[start : start + size - 1 + count])
        remember(ring, new, rows)
        start += count
    assert ring[[other for other in range(3) if other != place]].isnan().all()


@given(
    block_size=st.integers(1, 20),
    ratio=st.integers(1, 9),
    halves=st.integers(1, 2),
    chunks=st.lists(st.integers(1, 150), min_size=1, max_size=4),
)
def test_entries_are_found_where_they_were_put_and_made_of_their_tokens(
    block_size: int, ratio: int, halves: int, chunks: list[int]
) -> None:
    span, length = halves * ratio, sum(chunks)
    blocks = torch.randperm(-(-length // block_size))
    ring, cache = torch.zeros(1, span, 1), torch.full((len(blocks), room(block_size, ratio)), -1)
    start = 0
    for count in chunks:
        new = torch.arange(start, start + count)[:, None].float()
        (rows,) = together(AttentionBatch(torch.empty(0), None, [PrefillRow(0, count, start, blocks)]), block_size)
        closed = closing([rows], ratio, span, block_size)
        if closed.found:
            made = sources(ring, new, closed)[..., 0]
            first = closed.positions - (halves - 1) * ratio
            wanted = first[:, None] + torch.arange(span)
            assert torch.equal(closed.present, wanted >= 0)
            assert torch.equal(made, wanted.clamp_min(0).float())
            cache.view(-1)[closed.write_to] = closed.positions
        remember(ring, new, rows)
        start += count
        for tile in tiles([rows]):
            seen = far(tile.rows, ratio, block_size)
            entries = cache.view(-1)[seen.places[0]]
            assert entries.tolist() == [*range(0, tile.rows.end // ratio * ratio, ratio)]
            complete = entries + ratio - 1 <= tile.rows.positions[0][:, None]
            assert torch.equal(seen.allowed[0], complete)


def test_rows_of_one_token_look_at_their_own_window_and_no_further() -> None:
    tables, slots, positions = torch.zeros(5, 1, dtype=torch.int64), torch.tensor([4, 1, 0]), torch.tensor([0, 2, 9])
    batch = AttentionBatch(torch.empty(0), DecodeRows(tables, slots, positions), [])
    ((_, _, rows),) = tiles(together(batch, 16))
    assert near(rows, 4)[:, 0].tolist() == [
        [False, False, False, True],
        [False, True, True, True],
        [True, True, True, True],
    ]


def test_prompts_cut_into_tiles_for_a_gpu_are_the_same_rows_in_the_same_places() -> None:
    tables = torch.arange(40).view(4, 10)
    prompts = [PrefillRow(0, 130, 3, tables[2, :9], 2), PrefillRow(130, 7, 0, tables[1, :1], 1)]
    cut = [tile for row in prompts for tile in tile_prompt(row.slot, row.first, row.count, row.start)]
    on_gpu = AttentionBatch(torch.empty(0), None, [], PrefillTiles(tables, torch.tensor(cut), resumed=True))
    wanted = together(AttentionBatch(torch.empty(0), None, prompts), 16)
    for found, rows in zip(together(on_gpu, 16), wanted, strict=True):
        assert [torch.as_tensor(part).tolist() for part in found] == [torch.as_tensor(part).tolist() for part in rows]
