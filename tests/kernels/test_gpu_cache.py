"""The Triton kernels over an FP8 cache compute what their torch definitions define. Run with `pytest -m cuda`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.kernels.attention import (
    AttentionBatch,
    PrefillRow,
    Sight,
    SightMasks,
    decode_attention,
    decode_attention_torch,
    paged_attention,
)
from phalanx.kernels.cache import CacheScales, HeadNorms, in_fp8
from phalanx.kernels.fp8 import E4M3
from phalanx.kernels.rotary import rotate_and_store
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt
from tests.kernels.test_gpu import DTYPES, close, randn

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SCALES = CacheScales(key=0.05, value=3.0)
SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(6, 6, 64), (32, 8, 128), (8, 1, 128), (16, 2, 64), (4, 1, 36)]
)


def random_cache(blocks: int, page: int, kv_heads: int, head_dim: int) -> Tensor:
    """Keys such that some scores stand out, once they are scaled."""
    cache = torch.randn(blocks, page, 2, kv_heads, head_dim, device="cuda")
    cache[:, :, 0] *= 20
    return cache.to(E4M3)


@DTYPES
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary"),
    [(9, 3, 64, 64), (32, 8, 128, 128), (4, 1, 36, 36), (2, 2, 32, 16), (16, 2, 256, 64)],
)
def test_keys_and_values_are_stored_bit_by_bit(
    heads: int, kv_heads: int, head_dim: int, rotary: int, normed: bool, dtype: torch.dtype
) -> None:
    """What the kernel has normed and rotated in place, rounded by the definition; some of it is too large for e4m3."""
    tokens = 40
    qkv = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype) * 400
    qkv *= torch.logspace(-7, 1, tokens, device="cuda")[:, None, None].to(dtype)
    cos, sin = randn(tokens, 1, rotary, dtype=dtype), randn(tokens, 1, rotary, dtype=dtype)
    norms = HeadNorms(randn(head_dim, dtype=dtype) * 9, randn(head_dim, dtype=dtype) * 9, 1e-6) if normed else None
    write_to = torch.randperm(60, device="cuda")[:tokens]
    cache = torch.zeros(15, 4, 2, kv_heads, head_dim, device="cuda").to(E4M3)
    rotate_and_store(qkv, cos, sin, write_to, cache, heads, kv_heads, norms, SCALES)
    wanted = torch.zeros(60, 2, kv_heads, head_dim, dtype=torch.uint8)
    wanted[write_to.cpu()] = in_fp8(qkv[:, heads:].unflatten(1, (2, kv_heads)).cpu(), SCALES).view(torch.uint8)
    found = cache.flatten(0, 1).cpu()
    assert torch.equal(found.view(torch.uint8), wanted)
    assert found.float().abs().max() == 448
    assert not found.float().isnan().any()


@DTYPES
@pytest.mark.parametrize("window", [None, 7, 100])
@SHAPES
def test_decode_attention(heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 15, 16, 17, 63, 64, 700], device="cuda")
    decode_equals_definition(positions, 700 // 16 + 1, heads, kv_heads, head_dim, window, dtype)


@pytest.mark.parametrize("rows", [1, 64, 128])
def test_decode_attention_of_few_and_of_many_sequences(rows: int) -> None:
    """Split over the sequence as far as it goes, and not at all."""
    positions = torch.randint(0, 80 * 16, (rows,), device="cuda")
    decode_equals_definition(positions, 80, 32, 8, 128, None, torch.bfloat16)


def decode_equals_definition(
    positions: Tensor, width: int, heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    rows = len(positions)
    cache = random_cache(rows * width + 3, 16, kv_heads, head_dim)
    table = torch.randperm(len(cache), device="cuda")[: rows * width].view(rows, width)
    qkv = randn(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    decode = DecodeRows(table.int(), torch.randperm(rows, device="cuda"), positions)
    masks = SightMasks(AttentionBatch(positions, decode, []), 16, torch.float64)
    out = torch.full((rows, heads, head_dim), float("nan"), dtype=dtype, device="cuda")
    scale, q = head_dim**-0.5 * SCALES.key, qkv[:, :heads]
    decode_attention(q, cache, decode, masks, Sight(window), scale, out, SCALES.value)
    close(out, decode_attention_torch(q.double(), cache, decode, masks.decode(Sight(window)), scale, SCALES.value))


@DTYPES
@pytest.mark.parametrize("window", [None, 40, 200])
@SHAPES
def test_prefill_attention(heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    """Prompts from their start, chunks of longer ones, and one that ends a tile early, in one call."""
    spans, page = [(0, 300), (70, 130), (513, 128), (0, 2), (31, 129)], 16
    width, tokens = 700 // page + 1, sum(count for _, count in spans)
    cache = random_cache(len(spans) * width + 3, page, kv_heads, head_dim)
    tables = torch.randperm(len(cache), device="cuda")[: len(spans) * width].view(len(spans), width)
    qkv = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    rows, tiles, first = [], [], 0
    for sequence, (start, count) in enumerate(spans):
        rows.append(PrefillRow(first, count, start, tables[sequence, : -(-(start + count) // page)]))
        tiles += tile_prompt(sequence, first, count, start)
        first += count
    cut = PrefillTiles(tables, torch.tensor(tiles, dtype=torch.int32, device="cuda"), True)
    fast, plain = AttentionBatch(tables, None, [], cut), AttentionBatch(tables, None, rows)
    masks, scale = SightMasks(plain, page, torch.float64), head_dim**-0.5 * SCALES.key
    wanted = paged_attention(qkv.double(), heads, cache, plain, masks, Sight(window), scale, SCALES.value)
    close(paged_attention(qkv, heads, cache, fast, masks, Sight(window), scale, SCALES.value), wanted)


def test_queries_beyond_float16_do_not_break_attention() -> None:
    """Half-precision products are made in float16, which ends at 65504: larger queries stay finite."""
    cache = random_cache(4, 16, 1, 64)
    q = randn(1, 1, 64, dtype=torch.bfloat16) * 1e6
    decode = DecodeRows(*(torch.tensor(part, device="cuda") for part in ([[0, 1, 2]], [0], [40])))
    masks = SightMasks(AttentionBatch(decode.positions, decode, []), 16, torch.float32)
    out = torch.full((1, 1, 64), float("nan"), dtype=torch.bfloat16, device="cuda")
    decode_attention(q, cache, decode, masks, Sight(), 0.1, out, 1.0)
    assert out.isfinite().all()
