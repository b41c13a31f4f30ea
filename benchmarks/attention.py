"""Attention at decode alone on a GPU: `python benchmarks/attention.py`. A line for each model and batch, beside the
bytes of the cache at the speed of a large copy; for one row also from its heads on, as a product makes them.

Layers run in a graph, over as many caches as the GPU's own cache cannot hold. With `--shapes`, decode is also cut in
other ways: tokens at once, warps, stages, and parts of a sequence.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from graph_timing import microseconds
from torch import Tensor

from phalanx.bench.ceilings import measure_ceilings
from phalanx.kernels.cache import UNSCALED, Fresh
from phalanx.kernels.gpu import attention
from phalanx.kernels.gpu.attention_early import MOST_DIMENSIONS, decode_early
from phalanx.kernels.gpu.gemm import product as product_of
from phalanx.kernels.gpu.rows import rotate_and_store
from phalanx.kernels.tiling import DecodeRows, is_uneven

PAGE, LAYERS, INPUTS = 16, 12, 4096
CASES = ((1, 190), (1, 8192), (8, 1060), (32, 1060), (128, 1060))
SHAPES = ((16, 4, 5), (32, 4, 3), (32, 4, 5), (64, 2, 3), (64, 2, 5), (64, 4, 2), (64, 8, 3), (128, 4, 3), (128, 8, 2))


class Heads(NamedTuple):
    name: str
    queries: int
    keys: int
    dim: int


MODELS = (
    Heads("llama-3.1-8b", 32, 8, 128),
    Heads("llama-3.3-70b-tp4-rank", 16, 2, 128),
    Heads("qwen3.5-35b-a3b", 16, 2, 256),
    Heads("qwen3.5-27b", 24, 4, 256),
    Heads("gpt-oss-20b", 64, 8, 64),
)


def steps(heads: Heads, rows: int, context: int) -> list[Callable[[], None]]:
    """The same step in several layers."""
    blocks = -(-context // PAGE)
    tables = torch.randperm(rows * blocks, device="cuda").view(rows, blocks).int()
    positions = torch.full((rows,), context - 1, device="cuda")
    decode = DecodeRows(tables, torch.arange(rows, device="cuda"), positions, is_uneven([context] * rows, heads.keys))
    q = torch.randn(rows, heads.queries, heads.dim, device="cuda", dtype=torch.bfloat16)
    shape = rows * blocks, PAGE, 2, heads.keys, heads.dim
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    scale, out = heads.dim**-0.5, torch.empty_like(q)
    return [lambda cache=cache: attention.decode_attention(q, cache, decode, None, scale, out) for cache in caches]


def behind_a_product(heads: Heads, context: int) -> dict[str, float]:
    """One row from its product on, less the product: with heads turned and cached by a launch of their own, and by that
    of attention, which reads what is cached before the product has ended.
    """
    blocks, width = -(-context // PAGE), (heads.queries + 2 * heads.keys) * heads.dim
    x, rotary = torch.randn(1, INPUTS, device="cuda").bfloat16(), torch.randn(2, 1, 1, heads.dim, device="cuda")
    weights = [torch.randn(width, INPUTS, device="cuda").bfloat16() for _ in range(LAYERS)]
    caches = [torch.randn(blocks, PAGE, 2, heads.keys, heads.dim, device="cuda").bfloat16() for _ in range(LAYERS)]
    tables = torch.randperm(blocks, device="cuda").view(1, blocks).int()
    place, scale = torch.full((1,), context - 1, device="cuda"), heads.dim**-0.5
    decode, out = DecodeRows(tables, torch.zeros_like(place), place), x.new_empty(1, heads.queries, heads.dim)
    fresh = Fresh(*rotary.bfloat16(), tables[0, place // PAGE].long() * PAGE + place % PAGE, UNSCALED)

    def made(weight: Tensor) -> Tensor:
        return product_of(x, weight, None).view(1, -1, heads.dim)

    def apart(weight: Tensor, cache: Tensor) -> None:
        qkv = made(weight)
        rotate_and_store(qkv, fresh.cos, fresh.sin, fresh.write_to, cache, heads.queries, heads.keys)
        attention.decode_attention(qkv[:, : heads.queries], cache, decode, None, scale, out)

    def early(weight: Tensor, cache: Tensor) -> None:
        decode_early(made(weight), heads.queries, cache, decode, None, scale, out, 1.0, None, fresh)

    pairs = list(zip(weights, caches, strict=True))
    alone = microseconds([partial(made, weight) for weight in weights])
    ways = {"apart_us": apart, "early_us": early}
    return {name: round(microseconds([partial(way, *pair) for pair in pairs]) - alone, 2) for name, way in ways.items()}


def tell(heads: Heads, rows: int, context: int, shapes: bool, bytes_per_s: float) -> None:
    runs, moved = steps(heads, rows, context), rows * context * heads.keys * heads.dim * 4
    line = {"model": heads.name, "rows": rows, "context": context, "limit_us": round(moved / bytes_per_s * 1e6, 2)}
    whole = behind_a_product(heads, context) if rows == 1 and heads.dim <= MOST_DIMENSIONS else {}
    print(json.dumps(line | {"us": round(microseconds(runs), 2)} | whole), flush=True)
    shape_of, splits_of = attention._shape_of, attention.splits_of
    parts = sorted({splits_of(rows, heads.keys), *(number for number in (16, 32, 64) if number * rows <= 64)})
    found = []
    for shape, splits in product(SHAPES, parts) if shapes else ():
        attention._shape_of, attention.splits_of = lambda *_, s=shape: s, lambda *_, s=splits: s
        try:
            found.append((round(microseconds(runs), 2), f"{shape} in {splits}"))
        except Exception as error:
            print(json.dumps({"shape": shape, "error": str(error)[:200]}), flush=True)
    attention._shape_of, attention.splits_of = shape_of, splits_of
    if found:
        print(json.dumps(line | {"cuts": {cut: took for took, cut in sorted(found)[:8]}}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=[heads.name for heads in MODELS], default=None)
    parser.add_argument("--shapes", action="store_true")
    asked = parser.parse_args()
    bytes_per_s = measure_ceilings(torch.device("cuda"), torch.bfloat16).bytes_per_s
    for heads, (rows, context) in product(MODELS, CASES):
        if asked.models is None or heads.name in asked.models:
            tell(heads, rows, context, asked.shapes, bytes_per_s)


if __name__ == "__main__":
    main()
