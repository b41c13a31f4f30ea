"""Which tiles the invariant kernels should have: `python benchmarks/invariant.py`, on a GPU, about half a minute.

Times every product of a decode step of an 8B model, with each shape of tiles and number of leaves, beside the usual
product, and attention with each number of splits. Weights are read anew in every call: there are more of them than the
cache holds. The shapes change no bit as long as the same instruction multiplies; numbers of leaves and of splits do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise

import torch
from torch import Tensor

from phalanx.kernels.gpu import attention, gemm, invariant
from phalanx.kernels.gpu.gemm import Tile
from phalanx.kernels.tiling import DecodeRows

PRODUCTS = {
    "qkv 6144 x 4096": (6144, 4096, (1, 2, 4, 8)),
    "output 4096 x 4096": (4096, 4096, (8,)),
    "gate, up 28672 x 4096": (28672, 4096, (1, 2)),
    "down 4096 x 14336": (4096, 14336, (8,)),
}
TILES = (
    Tile(64, 128, 64, 4, 4), Tile(64, 128, 64, 8, 4), Tile(64, 128, 128, 4, 3), Tile(64, 64, 64, 4, 6),
    Tile(64, 64, 128, 4, 4), Tile(32, 128, 64, 4, 4), Tile(32, 64, 128, 4, 4), Tile(32, 128, 128, 4, 3),
)  # fmt: skip
CACHED = 3 * 2**26
"""Bytes that no cache holds."""
REPEATS = 30


def microseconds(call: Callable[[Tensor], object], weights: Sequence[Tensor]) -> float:
    """The middle of some calls, launched as a graph would: the host has long queued them when they run."""
    turn = cycle(weights)
    for weight in weights[:2]:
        call(weight)
    torch.cuda._sleep(20_000_000)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    for event in events[:-1]:
        event.record()
        call(next(turn))
    events[-1].record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events))
    return times[len(times) // 2]


def product(name: str, rows: int, outputs: int, inputs: int, leaves: Sequence[int]) -> None:
    copies = max(2, -(-CACHED // (2 * outputs * inputs)))
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    usual = microseconds(lambda weight: gemm.product(x, weight, None), weights)
    print(f"{name}, {rows} rows: usual {usual:.1f} us, {2 * outputs * inputs / usual / 1e3:,.0f} GB/s", flush=True)
    for tile in TILES:
        invariant.HALF_TILE = tile
        taken = [
            microseconds(lambda weight, n=count: invariant.product(x, weight, None, n, x.dtype), weights)
            for count in leaves
        ]
        told = ", ".join(f"{count} leaves {us:.1f}" for count, us in zip(leaves, taken, strict=True))
        print(f"  {tuple(tile)[:5]}: {told}", flush=True)


def attending(rows: int, length: int) -> None:
    heads, kv_heads, dim, page = 32, 8, 128, 16
    width = -(-length // page)
    caches = [torch.randn(rows * width, page, 2, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    tables = torch.randperm(rows * width, device="cuda").view(rows, width).int()
    q = torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    places = DecodeRows(tables, torch.arange(rows, device="cuda"), torch.full((rows,), length - 1, device="cuda"))
    usual = microseconds(lambda cache: attention.decode_attention(q, cache, places, None, 0.1, out), caches)
    print(f"attention, {rows} rows of {length}: usual {usual:.1f} us", flush=True)
    for splits in (4, 8, 16):
        invariant.SPLITS = splits
        us = microseconds(lambda cache: invariant.attention(q, cache, places, None, False, 0.1, None), caches)
        print(f"  {splits} splits: {us:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    asked = parser.parse_args()
    for name, (outputs, inputs, leaves) in PRODUCTS.items():
        product(name, asked.rows, outputs, inputs, leaves)
    attending(asked.rows, asked.context)
    attending(1, 16 * asked.context)


if __name__ == "__main__":
    main()
