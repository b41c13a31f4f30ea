"""How prompts are cut into tiles for a GPU."""

from __future__ import annotations

import pytest

from phalanx.kernels.attention import PROMPT_TILE, tile_prompt


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
