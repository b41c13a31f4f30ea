"""Latent attention and indexers on a GPU: in Triton's interpreter, and with `pytest -m cuda` at real sizes."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.indexer import rows_of
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt
from tests.kernels.apart import run_apart


@pytest.mark.parametrize("module", ["interpreted_latent", "interpreted_latent_stream"])
def test_the_kernels_attend_as_defined(module: str) -> None:
    run_apart(module)


def test_every_token_of_a_step_is_a_row_of_its_own() -> None:
    """Two rows of one token and room for a third, then two prompts, with a tile of no rows between."""
    tables = torch.zeros(9, 4, dtype=torch.int32)
    tiles = [*tile_prompt(4, 2, 130, 7), (0, 0, 0, 0, 0), *tile_prompt(1, 132, 3, 0)]
    cut = PrefillTiles(tables, torch.tensor(tiles, dtype=torch.int32), True)
    decode = DecodeRows(tables, torch.tensor([8, 3, 5]), torch.tensor([70, 0, 9]))
    rows = rows_of(AttentionBatch(tables, decode, [], cut), 135)
    assert rows.slots.tolist() == [8, 3] + [4] * 130 + [1] * 3
    assert rows.positions.tolist() == [70, 0, *range(7, 137), 0, 1, 2]
