"""Attention by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from phalanx.kernels import tiling
from phalanx.kernels.attention import AttentionBatch, Sight, SightMasks, decode_attention_torch, prefill_attention_torch
from phalanx.kernels.cache import UNSCALED, CacheScales, Fresh
from phalanx.kernels.fp8 import E4M3, GROUP, Quantised
from phalanx.kernels.gpu import attention as gpu
from phalanx.kernels.gpu import attention_early
from phalanx.kernels.gpu.attention_early import decode_early
from phalanx.kernels.gpu.rows import empty_quantised, quantise, rotate_and_store
from phalanx.kernels.rotary import cos_and_sin_torch
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt
from tests.kernels.interpreter import make_ready

PAGE = 8


def check_prompts(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    spans: list[tuple[int, int]],
    sunk: bool = False,
    broken: int | None = None,
) -> None:
    """Prompts from their start, or chunks of longer ones, against a cache that already holds this step's keys.

    One may be broken: the others are as they would be beside a whole one.
    """
    tokens, width = sum(count for _, count in spans), 40
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim)
    cache = torch.randn(len(spans) * width, PAGE, 2, kv_heads, head_dim)
    tables = torch.randperm(len(cache)).view(len(spans), width)
    tiles, first = [], 0
    for sequence, (start, count) in enumerate(spans):
        positions = torch.arange(start, start + count)
        places = tables[sequence, positions // PAGE] * PAGE + positions % PAGE
        cache.flatten(0, 1)[places] = qkv[first : first + count, heads:].unflatten(1, (2, kv_heads))
        if sequence == broken:
            qkv[first : first + count] = float("nan")
        tiles += tile_prompt(sequence, first, count, start)
        first += count
    cut = PrefillTiles(tables, torch.tensor(tiles, dtype=torch.int32), any(start for start, _ in spans))
    found, wanted = (torch.full((tokens, heads, head_dim), float("nan")) for _ in range(2))
    sinks = torch.randn(heads) * 2 if sunk else None
    prefill_attention_torch(qkv[:, :heads], cache, cut, Sight(window, sinks=sinks), 0.2, wanted)
    for sequence, (start, _) in enumerate(spans if window else []):
        gone = torch.arange(max(0, start - window + 1))  # type: ignore[operator]
        cache.flatten(0, 1)[tables[sequence, gone // PAGE] * PAGE + gone % PAGE] = float("nan")
    gpu.prefill_attention(qkv, heads, cache, cut, window, 0.2, found, sinks=sinks)
    assert broken is None or wanted.isnan().any()
    torch.testing.assert_close(found, wanted, equal_nan=broken is not None)
    if broken is not None:
        gpu.prefill_attention(qkv.half(), heads, cache.half(), cut, window, 0.2, half := found.half(), sinks=sinks)
        torch.testing.assert_close(half.float(), wanted, rtol=1e-2, atol=1e-2, equal_nan=True)
    if head_dim == GROUP:
        in_fp8, half = empty_quantised(tokens, heads * head_dim, qkv.device), found.half()
        for out in (half, in_fp8):
            gpu.prefill_attention(qkv.half(), heads, cache.half(), cut, window, 0.2, out, sinks=sinks)
        same(in_fp8, quantise(half.flatten(1)))


def same(found: Quantised, wanted: Quantised) -> None:
    for given, meant in zip(found, wanted, strict=True):
        assert torch.equal(given.float(), meant.float())


class Launches:
    """A kernel that keeps the grids it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self._kernel[grid]


def check_decode(
    heads: int,
    kv_heads: int,
    lengths: list[int],
    window: int | None,
    parts: int,
    uneven: bool = False,
    sunk: bool = False,
    head_dim: int = 16,
) -> None:
    """Every sequence in as many parts, each a program for every KV head."""
    rows, width, positions = len(lengths), -(-max(lengths) // PAGE), torch.tensor(lengths) - 1
    q, cache = torch.randn(rows, heads, head_dim), torch.randn(rows * width, PAGE, 2, kv_heads, head_dim)
    decode = DecodeRows(torch.randperm(len(cache)).view(rows, width).int(), torch.randperm(rows), positions, uneven)
    found = torch.full((rows, heads, head_dim), float("nan"))
    with patch.object(gpu, "_decode", Launches(gpu._decode)) as launches:
        sinks = torch.randn(heads) * 2 if sunk else None
        gpu.decode_attention(q, cache, decode, window, 0.2, found, sinks=sinks)
    assert launches.grids == [(kv_heads, rows, parts)]
    mask = SightMasks(AttentionBatch(positions, decode, []), PAGE, torch.float32).decode(Sight(window))
    torch.testing.assert_close(found, decode_attention_torch(q, cache, decode, mask, 0.2, sinks=sinks))
    if head_dim == GROUP:
        whole, half = empty_quantised(rows + 3, heads * head_dim, q.device), found.half()
        first = Quantised(whole.values[:rows], whole.scales[:rows])
        for out in (half, first):
            gpu.decode_attention(q.half(), cache.half(), decode, window, 0.2, out, sinks=sinks)
        same(first, quantise(half.flatten(1)))


def check_fresh(
    heads: int,
    kv_heads: int,
    head_dim: int,
    length: int,
    window: int | None,
    rotary: int,
    sunk: bool = False,
    in_fp8: bool = False,
    late: bool = False,
) -> None:
    """Heads that come as they were computed: the cache and what is attended are those of two launches. What kernels not
    yet ended write may come late: where the token is, and the tokens just before it.
    """
    width, position, dtype = -(-length // PAGE) + 2, torch.tensor([length - 1]), torch.float32 if in_fp8 else torch.half
    qkv = torch.randn(1, heads + 2 * kv_heads, head_dim, dtype=dtype)
    cache = torch.randn(3 * width, PAGE, 2, kv_heads, head_dim).to(E4M3 if in_fp8 else dtype)
    decode = DecodeRows(torch.randperm(len(cache)).view(3, width).int(), torch.tensor([1]), position)
    places = decode.tables[1, torch.arange(length) // PAGE].long() * PAGE + torch.arange(length) % PAGE
    cos, sin = cos_and_sin_torch(position, torch.rand(rotary // 2), 1.2, dtype)
    scales = CacheScales(0.5, 2.0) if in_fp8 else UNSCALED
    sinks = torch.randn(heads) * 2 if sunk else None
    found, wanted = (torch.full((1, heads, head_dim), float("nan"), dtype=dtype) for _ in range(2))
    turned, filled, write_to = qkv.clone(), cache.clone(), places[-1:]
    rotate_and_store(turned, cos, sin, write_to, filled, heads, kv_heads, None, scales)
    asked = (window, 0.2 * scales.key)
    gpu.decode_attention(turned[:, :heads], filled, decode, *asked, wanted, scales.value, sinks)
    fresh, flat, recent = (
        Fresh(cos, sin, write_to, scales),
        cache.flatten(0, 1),
        places[-attention_early.ASIDE - 1 : -1],
    )
    whole = flat.clone()
    flat[write_to] = float("nan")

    def begin() -> None:
        """Nothing that may come late is there."""
        flat[recent] = float("nan")
        if late:
            decode.slots[0], decode.positions[0] = 2**40, 7

    def wait() -> None:
        flat[recent] = whole[recent]
        decode.slots[0], decode.positions[0] = 1, length - 1

    with patch.multiple(attention_early, let_next_start=begin, wait_for_ahead=wait):
        decode_early(qkv, heads, cache, decode, *asked, found, scales.value, sinks, fresh)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    assert torch.equal(cache.float(), filled.float())


def main() -> None:
    make_ready()
    torch.manual_seed(0)
    tiling.SPLIT_TARGET, gpu.MANY_PROGRAMS = 12, 18
    for window in (None, 150):
        check_decode(2, 2, [300], window, parts=8)
        check_decode(4, 2, [1, 700, 130], window, parts=2, sunk=True)
        check_decode(4, 4, [1, 200, 3, 4, 5], window, parts=1)
        check_decode(4, 4, [1, 200, 3, 4, 5], window, parts=1, sunk=True)
        check_decode(2, 1, [700, 1, 130], window, parts=64, uneven=True)
        check_decode(2, 2, [300, 1, 130], window, parts=16, uneven=True)
    check_decode(4, 2, [1, 200, 130], None, parts=2, head_dim=128)
    check_decode(2, 1, [70, 5], None, parts=8, head_dim=256)
    check_decode(4, 4, [1, 200, 3, 4, 5], None, parts=1, head_dim=128)
    for length in (1, 2, 64, 65, 81, 200):
        check_fresh(4, 2, 16, length, None, 16)
    check_fresh(4, 4, 16, 700, None, 16, sunk=True)
    check_fresh(32, 16, 16, 66, None, 16, sunk=True)  # in one part
    check_fresh(4, 4, 16, 300, 150, 16, sunk=True, late=True)
    check_fresh(2, 1, 128, 300, None, 128, late=True)
    check_fresh(4, 2, 24, 70, None, 8)
    check_fresh(4, 2, 16, 90, 20, 16, in_fp8=True)
    check_prompts(2, 1, 128, None, [(37, 20), (0, 70)])
    for broken in (0, 1):
        check_prompts(2, 1, 16, None, [(0, 20), (0, 150), (0, 7)], broken=broken)
        check_prompts(2, 1, 16, 40, [(37, 100), (60, 50), (0, 64)], broken=broken)
    for window in (None, 40):
        check_prompts(4, 2, 16, window, [(0, 130), (0, 5)])
        check_prompts(4, 2, 16, window, [(37, 130), (0, 129), (64, 5)])
        check_prompts(3, 3, 24, window, [(37, 20), (0, 129)], sunk=True)
        with patch.object(gpu, "TILE_BYTES", 64 * 16 * 4):  # two programs for a tile of queries
            check_prompts(2, 1, 16, window, [(37, 100), (0, 129), (5, 3)])
            check_decode(4, 2, [1, 200, 130], window, parts=2)


if __name__ == "__main__":
    main()
