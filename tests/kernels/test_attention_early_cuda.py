"""Attention that reads keys and values early is what two launches are. Run with `pytest -m cuda`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.kernels.attention import (
    AttentionBatch,
    Sight,
    SightMasks,
    paged_attention,
    paged_attention_quantised,
    takes_fresh,
)
from phalanx.kernels.cache import UNSCALED, CacheScales, Fresh
from phalanx.kernels.fp8 import E4M3
from phalanx.kernels.gemm import Gemm
from phalanx.kernels.quantise import quantise
from phalanx.kernels.rotary import rotate_and_store
from phalanx.kernels.tiling import DecodeRows
from tests.kernels.test_gpu import close, randn

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="no GPU on which kernels start early",
    ),
]


def batch_at(position: int, table: Tensor) -> AttentionBatch:
    positions = torch.tensor([position], device="cuda")
    slots = torch.tensor([1], device="cuda")
    write_to = table[1, position // 16].long()[None] * 16 + position % 16
    return AttentionBatch(write_to, DecodeRows(table, slots, positions), [])


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 128])
@pytest.mark.parametrize("position", [0, 1, 15, 63, 64, 65, 80, 190, 1100, 9000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary"), [(32, 8, 128, 128), (64, 8, 64, 64), (16, 2, 128, 64), (6, 6, 36, 36)]
)
def test_the_cache_and_what_is_attended(
    heads: int, kv_heads: int, head_dim: int, rotary: int, position: int, window: int | None, in_fp8: bool
) -> None:
    cache = randn(3 * 600, 16, 2, kv_heads, head_dim).to(E4M3 if in_fp8 else torch.bfloat16)
    scales = CacheScales(0.5, 2.0) if in_fp8 else UNSCALED
    batch = batch_at(position, torch.randperm(len(cache), device="cuda").view(3, 600).int())
    qkv, (cos, sin) = randn(1, heads + 2 * kv_heads, head_dim), randn(2, 1, 1, rotary)
    sight = Sight(window, sinks=randn(heads) if heads == 64 else None)
    turned, filled = qkv.clone(), cache.clone()
    rotate_and_store(turned, cos, sin, batch.write_to, filled, heads, kv_heads, None, scales)
    masks = SightMasks(batch, 16, torch.bfloat16)
    wanted = paged_attention(turned, heads, filled, batch, masks, sight, 0.1, scales.value)
    assert takes_fresh(batch, cache, sight, qkv.dtype)
    fresh = Fresh(cos, sin, batch.write_to, scales)
    twin = cache.clone()
    close(paged_attention(qkv, heads, cache, batch, masks, sight, 0.1, scales.value, fresh), wanted)
    assert torch.equal(cache.view(torch.uint8), filled.view(torch.uint8))
    if head_dim == 128:
        found = paged_attention_quantised(qkv, heads, twin, batch, masks, sight, 0.1, scales.value, fresh)
        again = paged_attention(qkv, heads, cache, batch, masks, sight, 0.1, scales.value, fresh)
        for given, meant in zip(found, quantise(again.flatten(1)), strict=True):
            assert torch.equal(given.float(), meant.float())


def test_tokens_that_kernels_just_ahead_write() -> None:
    """A sequence goes on token by token in a graph, each by products of the last, as if all were waited for."""
    heads, kv_heads, head_dim, first = 32, 8, 128, 150
    wide = Gemm(randn((heads + 2 * kv_heads) * head_dim, heads * head_dim) * 0.02)
    table = torch.randperm(60, device="cuda").view(3, 20).int()
    cache, (cos, sin) = randn(60, 16, 2, kv_heads, head_dim), randn(2, 1, 1, head_dim)
    batches = [batch_at(first + step, table) for step in range(24)]
    start, held = randn(1, heads * head_dim), cache.clone()

    def run(wait: bool) -> Tensor:
        x = start
        for batch in batches:
            qkv = wide(x).view(1, -1, head_dim)
            masks, fresh = SightMasks(batch, 16, torch.bfloat16), Fresh(cos, sin, batch.write_to, UNSCALED)
            x = paged_attention(qkv, heads, cache, batch, masks, Sight(), 0.1, fresh=fresh).flatten(1)
            if wait:
                torch.cuda.synchronize()
        return x

    wanted, after = run(wait=True).clone(), cache.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(wait=False)
    for _ in range(20):
        cache.copy_(held)
        graph.replay()
        assert torch.equal(found, wanted)
        assert torch.equal(cache, after)
