"""Latent attention and indexers by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.gpu import latent, latent_prompts, latent_rows
from phalanx.kernels.indexer import Best, Chosen, choose_gpu, choose_torch, rows_of
from phalanx.kernels.latent import Heads, by_heads, keep_latents, latent_attention_gpu, latent_attention_torch
from phalanx.kernels.rotary import apply_rotary
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt
from tests.kernels.interpreter import make_ready

PAGE, RANK, ROPE = 8, 40, 8


class Step:
    """Rows of one token, then prompts, of sequences whose earlier tokens are cached."""

    def __init__(self, lengths: list[int], spans: list[tuple[int, int]], uneven: bool = False) -> None:
        starts = [length - 1 for length in lengths] + [start for start, _ in spans]
        counts = [1] * len(lengths) + [count for _, count in spans]
        sequences, width = len(starts), -(-max(map(sum, zip(starts, counts, strict=True))) // PAGE)
        self.tokens = sum(counts)
        self.cache = torch.randn(sequences * width, PAGE, RANK + ROPE)
        self.tables = torch.randperm(len(self.cache)).view(sequences, width).int()
        self.positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        slots = torch.arange(sequences).repeat_interleave(torch.tensor(counts))
        self.places = self.tables[slots, self.positions // PAGE] * PAGE + self.positions % PAGE
        tiles, first = [(0, 0, 0, 0, 0)], len(lengths)
        for sequence, (start, count) in enumerate(spans, start=len(lengths)):
            tiles += tile_prompt(sequence, first, count, start)
            first += count
        alone = len(lengths)
        decode = DecodeRows(self.tables, slots[:alone], self.positions[:alone], uneven) if alone else None
        cut = PrefillTiles(self.tables, torch.tensor(tiles, dtype=torch.int32), any(start for start, _ in spans))
        self.batch = AttentionBatch(self.places.long(), decode, [], cut if spans else None)


def check_attention(heads: int, nope: int, v: int, step: Step, top: int | None = None) -> None:
    q = torch.randn(step.tokens, heads, nope + ROPE)
    turns = torch.randn(2, step.tokens, 1, ROPE).unbind()
    kept = step.cache.flatten(0, 1)[step.places.long()]
    matrices = Heads(torch.randn(heads, nope + v, RANK) * 0.2, nope)
    best = chosen = None
    if top:
        best, chosen = _choices(step, top)
    found = latent_attention_gpu(q, turns, kept, step.cache, step.batch, matrices, 0.2, best)
    q = torch.cat((q[..., :nope], apply_rotary(q[..., nope:], *turns)), -1)
    wanted = latent_attention_torch(q, step.cache, step.batch, matrices, 0.2, chosen)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def _choices(step: Step, top: int, heads: int = 5, width: int = 24) -> tuple[Best, Chosen]:
    """What an indexer chooses, by its kernel and by definition."""
    keys = torch.randn(*step.cache.shape[:2], width)
    q, weights = torch.randn(step.tokens, heads, width), torch.randn(step.tokens, heads)
    best = choose_gpu(q, weights, keys, rows_of(step.batch, step.tokens), top)
    assert best is not None
    return best, choose_torch(q, weights, keys, step.batch, top, torch.float32)


def check_beside_a_broken_prompt(dtype: torch.dtype) -> None:
    """Prompts from their start are as they would be beside a whole one."""
    step, heads, nope, v = Step([], [(0, 20), (0, 70), (0, 5)]), 2, 24, 16
    q, kept = (torch.randn(step.tokens, *size, dtype=dtype) for size in ((heads, nope + ROPE), (RANK + ROPE,)))
    turns, wide = torch.randn(2, step.tokens, 1, ROPE).unbind(), torch.randn(step.tokens, heads, nope + v, dtype=dtype)
    whole, found = torch.full((2, step.tokens, heads, v), float("nan"), dtype=dtype).unbind()
    tiles = step.batch.tiles
    assert tiles is not None
    latent_prompts.prefill_wide(q, *turns, wide, kept, tiles, 0.2, whole)
    wide[20:90] = kept[20:90] = float("nan")
    latent_prompts.prefill_wide(q, *turns, wide, kept, tiles, 0.2, found)
    assert not whole.isnan().any()
    assert found[20:90].isnan().all()
    assert torch.equal(found[:20], whole[:20])
    assert torch.equal(found[90:], whole[90:])


def check_kept(tokens: int, rank: int, rope: int) -> None:
    """From columns of a wider matrix, to places in no order."""
    entered, weight = torch.randn(tokens, 3 + rank + rope)[:, 3:], torch.randn(rank)
    cos, sin = torch.randn(2, tokens, 1, rope).unbind()
    caches: list[Tensor] = [torch.zeros(tokens, 4, rank + rope) for _ in range(2)]
    places = torch.randperm(tokens * 4)[:tokens]
    found = latent_rows.keep_latents(entered, weight, 1e-6, cos, sin, places, caches[0])
    wanted = keep_latents(entered, weight, 1e-6, (cos, sin), places, caches[1])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*caches)


def check_by_heads(rows: int, heads: int, inputs: int, outputs: int, turned: bool) -> None:
    """From and to some columns of each head; matrices that lie by inputs or by outputs."""
    x = torch.randn(rows, heads, inputs + 3)[..., :inputs]
    matrices = torch.randn(heads, outputs, inputs).mT if turned else torch.randn(heads, inputs, outputs)
    found, wanted = torch.full((2, rows, heads, outputs + 5), 7.0).unbind()
    latent_rows.by_heads(x, matrices, found[..., :outputs])
    by_heads(x, matrices, wanted[..., :outputs])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def check_tall_tiles() -> None:
    """Cut as for tensor cores: more cached tokens at once, and heads that fill the columns or do not."""
    usual = latent.shape_of
    for columns in (16, 32):
        latent.shape_of = lambda *_, columns=columns: latent.LatentTile(columns, 64, 4, 3)
        check_attention(20, 12, 16, Step([64, 1, 65, 129], []))
        check_attention(5, 12, 16, Step([63], [(60, 10), (0, 7)]))
    latent.shape_of = usual


def main() -> None:
    make_ready()
    torch.manual_seed(0)
    check_kept(3, 40, 8)
    for dtype in (torch.float32, torch.float16):
        check_beside_a_broken_prompt(dtype)
    latent_rows.NUMBERS_AT_ONCE = 1024
    for turned in (False, True):
        check_by_heads(1, 3, 24, 70, turned)
        check_by_heads(70, 2, 40, 33, turned)
    latent.READERS = 12
    check_tall_tiles()
    check_attention(5, 12, 20, Step([1, 16, 17, 33, 2], []))
    check_attention(20, 24, 16, Step([65, 1], []))
    check_attention(3, 12, 16, Step([1, 3] + [1] * 11, []))
    check_attention(3, 12, 16, Step([40, 1], [], uneven=True))
    check_attention(3, 12, 16, Step([120], []))  # more parts than are joined unseen
    check_attention(2, 24, 20, Step([9, 1], [(0, 130), (0, 5), (0, 31)]))
    check_attention(2, 12, 40, Step([9], [(37, 131), (0, 17), (64, 5)]))
    check_attention(5, 12, 20, Step([70, 3, 33], []), top=16)
    check_attention(3, 12, 20, Step([40, 3], [(0, 18), (21, 5)]), top=16)


if __name__ == "__main__":
    main()
