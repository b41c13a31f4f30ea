"""Where a latent attention layer's time goes on a GPU: `python benchmarks/latent.py`. A line for each part and size.

Parts run in a graph, over as many caches as the GPU's own cache cannot hold, at the sizes of GLM-4.7-Flash and of a
rank of DeepSeek-V3 at TP=8. Beside each stand its bytes at the speed of a large copy, or its FLOPs a second. With
`--shapes`, decode is also cut in other ways.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import NamedTuple

import torch
from graph_timing import microseconds
from torch import Tensor

from phalanx.bench.ceilings import measure_ceilings
from phalanx.kernels.gpu import latent, latent_prompts, latent_rows
from phalanx.kernels.indexer import choose_gpu
from phalanx.kernels.latent import Heads, by_heads
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt

PAGE, RANK, ROPE = 16, 512, 64
LAYERS = 12
HALF = torch.bfloat16
SHAPES = [latent.LatentTile(*cut) for cut in ((32, 64, 8, 3), (16, 64, 4, 3), (16, 32, 4, 4), (32, 32, 4, 4))]


class Size(NamedTuple):
    name: str
    heads: int
    nope: int
    v: int


SIZES = (Size("glm-4.7-flash", 20, 192, 256), Size("deepseek-v3-tp8-rank", 16, 128, 128))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=HALF)


class Layer:
    """One layer's cache and weights, and what a step brings to it."""

    def __init__(self, size: Size, rows: int, context: int) -> None:
        blocks = -(-context // PAGE)
        self.cache = randn(rows * blocks, PAGE, RANK + ROPE)
        self.heads = Heads(randn(size.heads, size.nope + size.v, RANK), size.nope)
        tables = torch.randperm(rows * blocks, device="cuda").view(rows, blocks).int()
        self.decode = DecodeRows(
            tables, torch.arange(rows, device="cuda"), torch.full((rows,), context - 1, device="cuda")
        )
        q, turn = randn(rows, size.heads, size.nope + ROPE), randn(rows, 1, ROPE)
        self.asked = latent.LatentQueries(randn(rows, size.heads, RANK), q, turn, turn)
        self.attended, self.out = randn(rows, size.heads, RANK), randn(rows, size.heads, size.v)
        self.entered, self.norm, self.write_to = randn(rows, RANK + ROPE), randn(RANK), self.decode.slots

    def keep(self) -> None:
        latent_rows.keep_latents(self.entered, self.norm, 1e-6, *self.asked[2:], self.write_to, self.cache)

    def bring(self) -> None:
        by_heads(self.asked.q[..., : self.heads.nope_dim], self.heads.keys, self.asked.brought)

    def attend(self) -> None:
        latent.decode_latents(self.asked, self.cache, self.decode, 0.1, self.attended)

    def widen(self) -> None:
        by_heads(self.attended, self.heads.values.transpose(1, 2), self.out)

    def whole(self) -> None:
        for part in (self.keep, self.bring, self.attend, self.widen):
            part()


def tell(size: Size, rows: int, context: int, part: str, found: float, **more: object) -> None:
    line = {"model": size.name, "rows": rows, "context": context, "part": part, "us": round(found, 2)}
    print(json.dumps(line | more), flush=True)


def decode(size: Size, rows: int, context: int, bytes_per_s: float, shapes: bool) -> None:
    layers = [Layer(size, rows, context) for _ in range(max(2, LAYERS * 32 * 1024 // max(rows * context, 32 * 1024)))]
    cached, matrices = rows * context * (RANK + ROPE) * 2, size.heads * RANK * 2
    moved = {"keep": 0, "bring": matrices * size.nope, "attend": cached, "widen": matrices * size.v}
    moved["whole"] = sum(moved.values())
    for part, size_in_bytes in moved.items():
        found = microseconds([getattr(layer, part) for layer in layers])
        tell(size, rows, context, part, found, limit_us=round(size_in_bytes / bytes_per_s * 1e6, 2))
    usual = latent.shape_of
    for cut in SHAPES if shapes else ():
        latent.shape_of = lambda columns, dtype, cut=cut: cut
        try:
            tell(size, rows, context, f"attend {tuple(cut)}", microseconds([layer.attend for layer in layers]))
        except Exception as error:
            print(json.dumps({"part": f"attend {tuple(cut)}", "error": str(error)[:200]}), flush=True)
    latent.shape_of = usual


def prompts(size: Size, count: int, length: int, start: int) -> None:
    """Widened where they begin in this step, and where latents are."""
    tokens = count * length
    tiles = [tile for n in range(count) for tile in tile_prompt(n, n * length, length, start)]
    layer = Layer(size, count, start + length)
    cut = PrefillTiles(layer.decode.tables, torch.tensor(tiles, dtype=torch.int32, device="cuda"), start > 0)
    q, turn = randn(tokens, size.heads, size.nope + ROPE), randn(tokens, 1, ROPE)
    kept, out = randn(tokens, RANK + ROPE), randn(tokens, size.heads, size.v)
    pairs = count * size.heads * (length * start + length * length / 2)
    if not start:
        matrix = layer.heads.matrices.flatten(0, 1).t()
        wide = kept[:, :RANK] @ matrix
        found = microseconds([lambda: kept[:, :RANK] @ matrix])
        flops = 2 * tokens * matrix.numel()
        tell(size, count, length, "widen prompts", found, tflop_s=round(flops / found / 1e6, 1))
        run = partial(latent_prompts.prefill_wide, q, turn, turn, wide, kept, cut, 0.1, out)
        found = microseconds([run])
        flops = 2 * pairs * (size.nope + ROPE + size.v)
        tell(size, count, length, "attend wide", found, tflop_s=round(flops / found / 1e6, 1))
    asked, attended = (
        latent.LatentQueries(randn(tokens, size.heads, RANK), q, turn, turn),
        randn(tokens, size.heads, RANK),
    )
    found = microseconds([lambda: latent.prefill_latents(asked, layer.cache, cut, 0.1, attended)])
    flops = 2 * pairs * (2 * RANK + ROPE)
    tell(size, count, length, f"attend latents from {start}", found, tflop_s=round(flops / found / 1e6, 1))


def indexed(size: Size, rows: int, context: int, top_k: int) -> None:
    """DeepSeek-V3.2's indexer, and attention to what it chooses."""
    layer = Layer(size, rows, context)
    q, weights, keys = randn(rows, 64, 128), torch.randn(rows, 64, device="cuda"), randn(*layer.cache.shape[:2], 128)
    found = microseconds([lambda: choose_gpu(q, weights, keys, layer.decode, top_k)])
    tell(size, rows, context, f"choose {top_k}", found)
    best = choose_gpu(q, weights, keys, layer.decode, top_k)
    assert best is not None
    run = partial(latent.decode_latents, layer.asked, layer.cache, layer.decode, 0.1, layer.attended, best.positions)
    tell(size, rows, context, f"attend {top_k} chosen", microseconds([run]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", action="store_true")
    asked = parser.parse_args()
    bytes_per_s = measure_ceilings(torch.device("cuda", 0), HALF).bytes_per_s
    print(json.dumps({"copy_tb_s": round(bytes_per_s / 1e12, 2)}), flush=True)
    for size in SIZES:
        for rows, context in ((1, 256), (1, 20_000), (32, 1024), (128, 1024)):
            decode(size, rows, context, bytes_per_s, asked.shapes)
        prompts(size, 16, 1024, 0)
        prompts(size, 2, 1024, 8192)
    indexed(SIZES[1], 32, 16_384, 2048)


if __name__ == "__main__":
    main()
