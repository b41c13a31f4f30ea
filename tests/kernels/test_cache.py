"""The FP8 cache: what is stored, what is too large for it, and attention over it, on a CPU."""

from __future__ import annotations

import psutil
import pytest
import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, PrefillRow, Sight, SightMasks, decode_attention, paged_attention
from phalanx.kernels.cache import UNSCALED, CacheScales, zeros
from phalanx.kernels.fp8 import E4M3
from phalanx.kernels.rotary import rotate_and_store
from phalanx.kernels.tiling import DecodeRows

SCALES = CacheScales(key=0.05, value=3.0)
HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 16, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
def test_pages_of_a_new_cache_are_taken_when_they_are_written_to(dtype: torch.dtype) -> None:
    process, size = psutil.Process(), 2**28
    before = process.memory_info().rss
    cache = zeros(torch.empty(0, dtype=dtype), size // dtype.itemsize // 64, 64)
    assert cache.nbytes == size
    assert process.memory_info().rss - before < size // 8
    cache[5:7] = torch.ones(64).to(dtype)
    assert float(cache[4:8].float().sum()) == 128
    assert not cache.view(torch.uint8)[-1].any()
    cache.view(torch.uint8).fill_(1)
    assert process.memory_info().rss - before > size // 2


def test_small_and_empty_caches_are_zero_too() -> None:
    assert torch.equal(zeros(torch.empty(0), 3, 4), torch.zeros(3, 4))
    assert zeros(torch.empty(0), 0, 4).shape == (0, 4)


def all_of_e4m3() -> Tensor:
    """Every finite number of the format, by its own definition: 4 bits of exponent, 3 of mantissa, NaN at the end."""
    exponents, mantissas = torch.arange(16.0)[:, None], torch.arange(8.0)
    normal = 2.0 ** (exponents - 7) * (1 + mantissas / 8)
    normal[0] = mantissas / 8 * 2.0**-6
    return normal.flatten()[:-1]


def stored(qkv: Tensor, scales: CacheScales = UNSCALED) -> Tensor:
    """Keys and values as they lie in an FP8 cache, in the order of the tokens, widened. Nothing is rotated."""
    tokens = len(qkv)
    cache = torch.zeros(-(-tokens // PAGE) + 1, PAGE, 2, KV_HEADS, HEAD_DIM).to(E4M3)
    ones, zeros = torch.ones(tokens, 1, HEAD_DIM), torch.zeros(tokens, 1, HEAD_DIM)
    rotate_and_store(qkv, ones, zeros, torch.arange(tokens), cache, HEADS, KV_HEADS, scales=scales)
    return cache.float().flatten(0, 1)[:tokens]


def test_stored_is_the_nearest_number_of_the_format() -> None:
    qkv = torch.randn(50, HEADS + 2 * KV_HEADS, HEAD_DIM) * torch.logspace(-4, 2, 50)[:, None, None]
    kv = qkv[:, HEADS:].reshape(-1, 1).clone()
    grid = torch.cat((-all_of_e4m3(), all_of_e4m3()))
    nearest = (kv - grid).abs().min(1).values
    off = (stored(qkv).view(-1, 1) - kv).abs()[:, 0]
    torch.testing.assert_close(off, nearest, atol=0, rtol=1e-6)


def test_keys_and_values_have_a_scale_each() -> None:
    qkv = torch.randn(9, HEADS + 2 * KV_HEADS, HEAD_DIM)
    keys, values = qkv[:, HEADS : HEADS + KV_HEADS].clone(), qkv[:, HEADS + KV_HEADS :].clone()
    found = stored(qkv, SCALES)
    torch.testing.assert_close(found[:, 0] * SCALES.key, keys, rtol=0.07, atol=1e-3)
    torch.testing.assert_close(found[:, 1] * SCALES.value, values, rtol=0.07, atol=1e-2)


@pytest.mark.parametrize("large", [449.0, 465.0, 1e6, 1e38])
def test_what_is_too_large_becomes_the_largest(large: float) -> None:
    qkv = torch.zeros(2, HEADS + 2 * KV_HEADS, HEAD_DIM)
    qkv[0], qkv[1] = large, -large
    found = stored(qkv)
    assert found[0].unique().tolist() == [448.0]
    assert found[1].unique().tolist() == [-448.0]


@pytest.mark.parametrize("window", [None, 3, 7])
def test_attention_reads_what_was_rounded(window: int | None) -> None:
    """A prompt from its start, a chunk of another, single tokens: as attention over the widened cache in float64."""
    prompt, chunk, singles = (0, 9), (5, 6), [12, 0, 3]
    tokens = len(singles) + prompt[1] + chunk[1]
    cache = (torch.randn(20, PAGE, 2, KV_HEADS, HEAD_DIM) * 30).to(E4M3)
    tables = torch.randperm(20).view(5, 4)
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM) * 2
    spans = [(position, 1) for position in singles] + [prompt, chunk]
    positions = [torch.arange(start, start + count) for start, count in spans]
    places = [table[where // PAGE] * PAGE + where % PAGE for table, where in zip(tables, positions, strict=True)]
    ones, zeros = torch.ones(tokens, 1, HEAD_DIM), torch.zeros(tokens, 1, HEAD_DIM)
    rotate_and_store(qkv, ones, zeros, torch.cat(places), cache, HEADS, KV_HEADS, scales=SCALES)
    decode = DecodeRows(tables, torch.arange(3), torch.tensor(singles))
    prefills = [PrefillRow(3, 9, 0, tables[3, :3]), PrefillRow(12, 6, 5, tables[4, :3])]
    batch = AttentionBatch(torch.cat(places), decode, prefills)
    masks = SightMasks(batch, PAGE, torch.float32)
    found = paged_attention(qkv, HEADS, cache, batch, masks, Sight(window), 0.25 * SCALES.key, SCALES.value)
    widened = cache.double().flatten(0, 1)
    row = 0
    for table, where in zip(tables, positions, strict=True):
        for position in where.tolist():
            seen = torch.arange(max(0, position - window + 1) if window else 0, position + 1)
            kv = widened[table[seen // PAGE] * PAGE + seen % PAGE]
            for head in range(HEADS):
                keys, values = (kv[:, part, head // (HEADS // KV_HEADS)] * SCALES[part] for part in (0, 1))
                weights = (keys @ qkv[row, head].double() * 0.25).softmax(0)
                torch.testing.assert_close(found[row, head].double(), weights @ values, rtol=1e-4, atol=1e-4)
            row += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_single_tokens_over_an_fp8_cache_in_any_dtype(dtype: torch.dtype) -> None:
    cache = torch.randn(3, PAGE, 2, KV_HEADS, HEAD_DIM).to(E4M3)
    q = torch.randn(1, HEADS, HEAD_DIM).to(dtype)
    rows = DecodeRows(torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([0]), torch.tensor([9]))
    masks, out = (
        SightMasks(AttentionBatch(rows.positions, rows, []), PAGE, dtype),
        torch.empty(1, HEADS, HEAD_DIM).to(dtype),
    )
    decode_attention(q, cache, rows, masks, Sight(), 0.25, out, value_scale=2.0)
    wide, exact = (
        torch.empty(1, HEADS, HEAD_DIM),
        SightMasks(AttentionBatch(rows.positions, rows, []), PAGE, torch.float32),
    )
    decode_attention(q.float(), cache.float() * 2, rows, exact, Sight(), 0.125, wide)
    torch.testing.assert_close(out.float(), wide, rtol=0.02, atol=0.02 if dtype is torch.bfloat16 else 1e-5)
