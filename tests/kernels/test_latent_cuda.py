"""Latent attention by the GPU's kernels at the sizes of real models. Run with `pytest -m cuda`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.indexer import Best, choose_gpu, choose_torch, rows_of
from phalanx.kernels.latent import Heads, by_heads, keep_latents, latent_attention, latent_attention_torch
from phalanx.kernels.rotary import apply_rotary
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PAGE, RANK, ROPE = 16, 512, 64
HALF = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-2) -> None:
    assert not found.isnan().any()
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < tolerance, float(error)


def laid_out(spans: list[tuple[int, int]], alone: int, uneven: bool = False) -> tuple[AttentionBatch, int]:
    """Sequences from a position on, so many tokens each; the first ones are rows of one token."""
    width, tokens = -(-max(map(sum, spans)) // PAGE), sum(count for _, count in spans)
    tables = torch.randperm(len(spans) * width, device="cuda").view(len(spans), width).int()
    positions = torch.cat([torch.arange(start, start + count) for start, count in spans]).cuda()
    slots = torch.arange(len(spans)).repeat_interleave(torch.tensor([count for _, count in spans])).cuda()
    places = tables[slots, positions // PAGE].long() * PAGE + positions % PAGE
    tiles, first = [], alone
    for sequence, (start, count) in enumerate(spans[alone:], start=alone):
        tiles += tile_prompt(sequence, first, count, start)
        first += count
    cut = None
    if tiles:
        resumed = any(start for start, _ in spans[alone:])
        cut = PrefillTiles(tables, torch.tensor(tiles, dtype=torch.int32, device="cuda"), resumed)
    decode = DecodeRows(tables, slots[:alone], positions[:alone], uneven) if alone else None
    return AttentionBatch(places, decode, [], cut), tokens


def check(heads: int, nope: int, v: int, batch: AttentionBatch, tokens: int, top: int | None = None) -> None:
    """In bfloat16 as the definition in float32, where what is cached and asked is the same."""
    tables = batch.tiles.tables if batch.tiles else batch.decode.tables if batch.decode else torch.empty(0)
    cache = randn(tables.numel(), PAGE, RANK + ROPE)
    q, turns = randn(tokens, heads, nope + ROPE), (randn(tokens, 1, ROPE), randn(tokens, 1, ROPE))
    matrices = Heads(randn(heads, nope + v, RANK) * 0.05, nope)
    kept = cache.flatten(0, 1)[batch.write_to]
    best = chosen = None
    if top:
        keys, index_q = randn(*cache.shape[:2], 128), randn(tokens, 64, 128)
        weights = torch.randn(tokens, 64, device="cuda")
        best = choose_gpu(index_q, weights, keys, rows_of(batch, tokens), top)
        assert isinstance(best, Best)
        chosen = choose_torch(index_q, weights, keys, batch, top, torch.float32)
    scale = (nope + ROPE) ** -0.5
    found = latent_attention(q, turns, kept, cache, batch, matrices, scale, best)
    wide = torch.cat((q[..., :nope], apply_rotary(q[..., nope:].float(), *(turn.float() for turn in turns))), -1)
    wanted = latent_attention_torch(wide, cache.float(), batch, Heads(matrices.matrices.float(), nope), scale, chosen)
    close(found, wanted, 2e-2)


SIZES = pytest.mark.parametrize(
    ("heads", "nope", "v"), [(20, 192, 256), (16, 128, 128), (128, 128, 128), (5, 128, 128)]
)


@SIZES
@pytest.mark.parametrize("rows", [1, 3, 32, 128])
def test_decode(heads: int, nope: int, v: int, rows: int) -> None:
    """Of every length at which a block or a tile ends, or just not."""
    lengths = ([1, 63, 64, 65, 1000, 128, 16, 17] * 16)[:rows]
    check(heads, nope, v, *laid_out([(length - 1, 1) for length in lengths], rows))


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 128])
def test_decode_at_the_borders_of_pages_and_blocks(rows: int, uneven: bool) -> None:
    """Long enough that blocks are asked for before the kernel ahead has ended, and others after it."""
    lengths = ([190, 15, 16, 17, 300, 255, 256, 257, 433, 2, 127, 129] * 11)[:rows]
    for heads, nope, v in ((20, 192, 256), (5, 128, 128), (32, 128, 128)):
        check(heads, nope, v, *laid_out([(length - 1, 1) for length in lengths], rows, uneven))


def test_several_rows_of_a_sequence() -> None:
    """Rows of drafts: each sees those before it."""
    batch, tokens = laid_out([(500 + number, 1) for number in range(4)], 4)
    assert batch.decode is not None
    check(
        20,
        192,
        256,
        replace(batch, decode=replace(batch.decode, slots=torch.zeros(4, dtype=torch.int64).cuda())),
        tokens,
    )


def test_positions_that_a_kernel_just_ahead_makes() -> None:
    """In a graph, where kernels start before the one ahead has ended: positions read too early are read again."""
    batch, tokens = laid_out([(699, 1), (250, 1), (64, 1)], 3)
    assert batch.decode is not None
    cache, q = randn(batch.decode.tables.numel(), PAGE, RANK + ROPE), randn(tokens, 20, 256)
    turns, matrices = (randn(tokens, 1, ROPE), randn(tokens, 1, ROPE)), Heads(randn(20, 448, RANK) * 0.05, 192)
    kept = cache.flatten(0, 1)[batch.write_to]
    wanted = latent_attention(q, turns, kept, cache, batch, matrices, 0.1, None)
    made = torch.zeros(3, dtype=torch.int64, device="cuda")
    late = replace(batch, decode=replace(batch.decode, positions=made))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.copy_(batch.decode.positions)
        found = latent_attention(q, turns, kept, cache, late, matrices, 0.1, None)
    for _ in range(20):
        made.fill_(-7)
        graph.replay()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("heads", [5, 20, 32])
def test_what_a_request_that_broke_has_left_is_not_attended(heads: int) -> None:
    """Behind the last token of a sequence, in the page that it has now."""
    batch, tokens = laid_out([(69, 1), (0, 1), (63, 1), (64, 1), (700, 1)], 5)
    decode = batch.decode
    assert decode is not None
    cache = torch.full((decode.tables.numel(), PAGE, RANK + ROPE), float("nan"), dtype=HALF, device="cuda")
    for slot, position in zip(decode.slots, decode.positions.tolist(), strict=True):
        own = torch.arange(position + 1, device="cuda")
        cache.flatten(0, 1)[decode.tables[slot, own // PAGE].long() * PAGE + own % PAGE] = randn(len(own), RANK + ROPE)
    q, turns = randn(tokens, heads, 192 + ROPE), (randn(tokens, 1, ROPE), randn(tokens, 1, ROPE))
    matrices, kept = Heads(randn(heads, 192 + 256, RANK) * 0.05, 192), cache.flatten(0, 1)[batch.write_to]
    found, wanted = (
        latent_attention(q, turns, kept, held, batch, matrices, 0.06, None) for held in (cache, cache.nan_to_num())
    )
    assert not wanted.isnan().any()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("uneven", [False, True])
def test_decode_of_long_sequences(uneven: bool) -> None:
    check(20, 192, 256, *laid_out([(19_999, 1), (0, 1), (64, 1)], 3, uneven))
    check(16, 128, 128, *laid_out([(20_000, 1)], 1, uneven))


@SIZES
def test_prompts_from_their_start(heads: int, nope: int, v: int) -> None:
    spans = [(70, 1), (0, 1), (0, 130), (0, 300), (0, 128), (0, 2), (0, 65)]
    check(heads, nope, v, *laid_out(spans, 2))


@SIZES
def test_prompts_beside_one_that_broke(heads: int, nope: int, v: int) -> None:
    batch, tokens = laid_out([(0, 20), (0, 130), (0, 65)], 0)
    assert batch.tiles is not None
    cache, matrices = randn(batch.tiles.tables.numel(), PAGE, RANK + ROPE), Heads(randn(heads, nope + v, RANK), nope)
    q, turns = randn(tokens, heads, nope + ROPE), (randn(tokens, 1, ROPE), randn(tokens, 1, ROPE))
    kept, broken = cache.flatten(0, 1)[batch.write_to], torch.arange(20, 150, device="cuda")
    wanted = latent_attention(q, turns, kept, cache, batch, matrices, 0.06, None)
    spoilt = kept.index_fill(0, broken, float("nan"))
    cache.flatten(0, 1)[batch.write_to] = spoilt
    found = latent_attention(q, turns, spoilt, cache, batch, matrices, 0.06, None)
    assert found[20:150].isnan().all()
    for whole in (slice(0, 20), slice(150, None)):
        assert torch.equal(found[whole], wanted[whole])


@SIZES
def test_prompts_that_go_on(heads: int, nope: int, v: int) -> None:
    spans = [(70, 1), (0, 1), (70, 130), (0, 300), (513, 128), (1000, 2), (31, 65)]
    check(heads, nope, v, *laid_out(spans, 2))


def test_only_what_is_chosen_is_attended() -> None:
    check(16, 128, 128, *laid_out([(700, 1), (0, 1), (63, 1), (300, 1)], 4), top=64)
    check(16, 128, 128, *laid_out([(700, 1), (0, 130), (200, 70)], 1), top=64)


@SIZES
@pytest.mark.parametrize("rows", [1, 5, 32, 100, 128, 129])
def test_products_by_heads(heads: int, nope: int, v: int, rows: int) -> None:
    matrices, q = randn(heads, nope + v, RANK), randn(rows, heads, nope + ROPE)
    for x, matrix in ((q[..., :nope], matrices[:, :nope]), (randn(rows, heads, RANK), matrices[:, nope:].mT)):
        out = torch.full((rows, heads, matrix.shape[2]), float("nan"), device="cuda", dtype=HALF)
        by_heads(x, matrix, out)
        close(out, torch.einsum("thn,hnr->thr", x.double(), matrix.double()))


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_latents_are_kept(tokens: int) -> None:
    entered, weight = randn(tokens, 1536 + RANK + ROPE)[:, 1536:], randn(RANK)
    turns = randn(tokens, 1, ROPE), randn(tokens, 1, ROPE)
    cache = torch.zeros(tokens, 4, RANK + ROPE, dtype=HALF, device="cuda")
    places = torch.randperm(tokens * 4, device="cuda")[:tokens]
    kept = keep_latents(entered, weight, 1e-6, turns, places, cache)
    other = torch.zeros_like(cache, device="cpu", dtype=torch.float32)
    on_cpu = [part.cpu().float() for part in (entered, weight, *turns)]
    wanted = keep_latents(on_cpu[0], on_cpu[1], 1e-6, (on_cpu[2], on_cpu[3]), places.cpu(), other)
    close(kept.cpu(), wanted)
    close(cache.cpu(), other)


def test_rows_that_fill_up_do_no_harm_in_a_graph() -> None:
    """Recorded with other positions than replayed; lengths are read on the device."""
    batch, tokens = laid_out([(999, 1), (64, 1), (0, 1)], 3)
    assert batch.decode is not None
    positions = batch.decode.positions.clone()
    batch = replace(batch, decode=replace(batch.decode, positions=positions))
    assert batch.decode is not None
    cache, q = randn(batch.decode.tables.numel(), PAGE, RANK + ROPE), randn(tokens, 20, 256)
    turns, matrices = (randn(tokens, 1, ROPE), randn(tokens, 1, ROPE)), Heads(randn(20, 448, RANK) * 0.05, 192)
    kept = cache.flatten(0, 1)[batch.write_to]

    def attend() -> Tensor:
        return latent_attention(q, turns, kept, cache, batch, matrices, 0.1, None)

    wanted = attend()
    positions.zero_()
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    positions.copy_(torch.tensor([999, 64, 0]))
    graph.replay()
    assert torch.equal(found, wanted)
