"""The Triton kernels compute what their torch definitions define. Run with `pytest -m cuda`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.activation import silu_and_mul, silu_and_mul_torch
from phalanx.kernels.attention import AttentionBatch, DecodeRows, Masks, decode_attention, decode_attention_torch
from phalanx.kernels.gemm import Gemm
from phalanx.kernels.norm import add_rms_norm, add_rms_norm_torch
from phalanx.kernels.rotary import rotate_and_store, rotate_and_store_torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not run with -m cuda"),
]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def close(found: Tensor, wanted: Tensor) -> None:
    assert not found.isnan().any()
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    assert error < TOLERANCE[found.dtype], float(error)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (3, 5), (300, 1024), (7, 77)])
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
    total = x + residual
    found = add_rms_norm(x, residual, weight, 1e-5)
    close(found, add_rms_norm_torch(total.double(), None, weight.double(), 1e-5))
    close(residual, total)


@DTYPES
def test_add_rms_norm_of_heads_that_lie_apart(dtype: torch.dtype) -> None:
    heads, weight = randn(5, 12, 64, dtype=dtype)[:, 3:7], randn(64, dtype=dtype)
    close(add_rms_norm(heads, None, weight, 1e-6), add_rms_norm_torch(heads.double(), None, weight.double(), 1e-6))


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 14336), (5, 3), (33, 1300)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype) * 4
    close(silu_and_mul(gate_up), silu_and_mul_torch(gate_up.double()))


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary"), [(9, 3, 64, 64), (4, 1, 36, 36), (2, 2, 32, 16)])
def test_rotate_and_store(heads: int, kv_heads: int, head_dim: int, rotary: int, dtype: torch.dtype) -> None:
    qkv = randn(5, heads + 2 * kv_heads, head_dim, dtype=dtype)
    cos, sin = randn(5, 1, rotary, dtype=dtype), randn(5, 1, rotary, dtype=dtype)
    write_to = torch.tensor([3, 0, 17, 9, 23], device="cuda")
    cache = torch.zeros(6, 4, 2, kv_heads, head_dim, dtype=dtype, device="cuda")
    twin, other = qkv.double(), cache.double()
    rotate_and_store(qkv, cos, sin, write_to, cache, heads, kv_heads)
    rotate_and_store_torch(twin, cos.double(), sin.double(), write_to, other, heads, kv_heads)
    close(qkv, twin)
    close(cache, other)


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 36), (32, 8, 128), (6, 6, 18)])
def test_decode_attention(heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 15, 16, 17, 63, 64, 700], device="cuda")
    rows, width = len(positions), 700 // 16 + 1
    cache = randn(rows * width + 3, 16, 2, kv_heads, head_dim, dtype=dtype)
    table = torch.randperm(len(cache), device="cuda")[: rows * width].view(rows, width)
    qkv = randn(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    decode = DecodeRows(table, positions)
    masks = Masks(AttentionBatch(positions, decode, []), 16, torch.float64)
    out, scale = torch.full((rows, heads, head_dim), float("nan"), dtype=dtype, device="cuda"), head_dim**-0.5
    decode_attention(qkv[:, :heads], cache, decode, masks, window, scale, out)
    wanted = decode_attention_torch(qkv[:, :heads].double(), cache.double(), decode, masks.decode(window), scale)
    close(out, wanted)


@DTYPES
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1, 3), (7, 5000), (1030, 96)])
def test_matrix_vector(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    product = Gemm(randn(outputs, inputs, dtype=dtype), randn(outputs, dtype=dtype))
    x = randn(1, inputs, dtype=dtype)
    assert product.bias is not None
    close(product(x), F.linear(x.double(), product.weight.double(), product.bias.double()))


def test_a_cache_of_more_than_two_billion_elements() -> None:
    """Places beyond 32 bits: the last blocks of a 4.6 GB cache."""
    blocks, rows, heads, kv_heads, head_dim = 70_000, 3, 16, 8, 128
    cache = torch.zeros(blocks, 16, 2, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    qkv = randn(rows, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16)
    cos, sin = torch.ones(rows, 1, head_dim, device="cuda"), torch.zeros(rows, 1, head_dim, device="cuda")
    table = torch.arange(blocks - rows, blocks, device="cuda")[:, None]
    rotate_and_store(qkv, cos.bfloat16(), sin.bfloat16(), table[:, 0] * 16, cache, heads, kv_heads)
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    decode, out = DecodeRows(table, positions), torch.empty(rows, heads, head_dim, device="cuda").bfloat16()
    masks = Masks(AttentionBatch(positions, decode, []), 16, torch.bfloat16)
    decode_attention(qkv[:, :heads], cache, decode, masks, None, 1.0, out)
    close(out, qkv[:, heads + kv_heads :].repeat_interleave(2, dim=1))
