"""How prompts are cut into tiles for a GPU, and what attention over tiles means."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.attention import AttentionBatch, PrefillRow, Sight, SightMasks, paged_attention
from phalanx.kernels.tiling import PROMPT_TILE, PrefillTiles, tile_prompt
from tests.kernels.apart import run_apart


@pytest.mark.parametrize("count", [2, PROMPT_TILE - 1, PROMPT_TILE, PROMPT_TILE + 1, 5 * PROMPT_TILE + 17])
def test_tiles_hold_every_row_once_at_its_position(count: int) -> None:
    tiles = tile_prompt(sequence=3, first=40, count=count, start=7)
    rows = {first + row: start + row for _, first, size, start, _ in tiles for row in range(size)}
    assert rows == {40 + row: 7 + row for row in range(count)}
    assert sum(size for _, _, size, *_ in tiles) == count
    assert {sequence for sequence, *_ in tiles} == {3}
    assert max(size for _, _, size, *_ in tiles) <= PROMPT_TILE
    assert [start for *_, start, _ in tiles] == sorted((start for *_, start, _ in tiles), reverse=True)
    assert {begins for *_, begins in tiles} == {7}


@pytest.mark.parametrize("window", [None, 1, 40, 200])
def test_attention_over_tiles_is_that_over_whole_prompts(window: int | None) -> None:
    """Prompts from their start and chunks of longer ones, with tiles of no rows between."""
    heads, kv_heads, head_dim, page = 6, 2, 16, 8
    spans = [(0, 300), (70, 130), (0, 2), (31, 129)]
    width, tokens = 304 // page, sum(count for _, count in spans)
    cache = torch.randn(len(spans) * width + 3, page, 2, kv_heads, head_dim, dtype=torch.float64)
    tables = torch.randperm(len(cache))[: len(spans) * width].view(len(spans), width)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, dtype=torch.float64)
    rows, tiles, first = [], [(0, 0, 0, 0, 0)], 0
    for sequence, (start, count) in enumerate(spans):
        positions = torch.arange(start, start + count)
        places = tables[sequence, positions // page] * page + positions % page
        cache.flatten(0, 1)[places] = qkv[first : first + count, heads:].unflatten(1, (2, kv_heads))
        rows.append(PrefillRow(first, count, start, tables[sequence, : -(-(start + count) // page)]))
        tiles += [*tile_prompt(sequence, first, count, start), (0, 0, 0, 0, 0)]
        first += count
    plain = AttentionBatch(tables, None, rows)
    cut = AttentionBatch(tables, None, [], PrefillTiles(tables, torch.tensor(tiles, dtype=torch.int32), True))
    masks = SightMasks(plain, page, torch.float64)
    wanted = paged_attention(qkv, heads, cache, plain, masks, Sight(window), 0.25)
    torch.testing.assert_close(paged_attention(qkv, heads, cache, cut, masks, Sight(window), 0.25), wanted)


@pytest.mark.slow
def test_the_kernels_attend_as_defined() -> None:
    """In Triton's interpreter; on a GPU `test_gpu.py` says more."""
    run_apart("interpreted_attention")
