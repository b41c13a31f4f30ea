"""The kernels of `invariant` give the same bits however they are shared: in Triton's interpreter, as built for a GPU
(where the same instructions have to multiply in every case), and on one.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, Sight, SightMasks, decode_attention_torch
from phalanx.kernels.invariant import product_torch
from phalanx.kernels.moe import ExpertWeights, fused_experts_torch
from phalanx.kernels.tiling import DecodeRows
from phalanx.spec.ffn import SILU
from tests.kernels.apart import run_apart

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "interpret"), [("interpreted_invariant", True), ("compiled_invariant", False)])
def test_the_kernels_give_the_same_bits_in_any_company(module: str, interpret: bool) -> None:
    run_apart(module, interpret=interpret)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.cuda
@DTYPES
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1000, 1536), (24, 72)])
def test_a_product_on_a_gpu_has_the_same_bits_at_every_tp_and_in_any_company(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    """Of 1, 2, 4 and 8 ranks, and a row alone or among 2 to 300; columns of a rank among those of all."""
    from phalanx.kernels.gpu import invariant as gpu

    x, weight, bias = randn(300, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype), randn(outputs, dtype=dtype)
    whole = gpu.product(x, weight, bias, 8, dtype)
    close = {"rtol": 2e-2, "atol": 0.5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(whole, product_torch(x, weight, bias, 8, dtype), **close)
    for ranks in (2, 4, 8):
        width = inputs // ranks
        cut = zip(x.split(width, 1), weight.split(width, 1), strict=True)
        parts = [
            gpu.product(own, columns.contiguous(), None if rank else bias, 8 // ranks, torch.float32)
            for rank, (own, columns) in enumerate(cut)
        ]
        assert torch.equal(gpu.join_ranks(torch.cat(parts, 1), ranks, dtype), whole), ranks
        own = weight.split(outputs // ranks)[1].contiguous()
        few = gpu.product(x[:7], own, None, 2, dtype)
        every = gpu.product(x, weight, None, 2, dtype)
        assert torch.equal(few, every[:7, outputs // ranks : outputs // ranks + len(own)]), ranks
    for rows in (1, 2, 16, 32, 33, 64, 65, 200):
        assert torch.equal(gpu.product(x[5 : 5 + rows], weight, bias, 8, dtype), whole[5 : 5 + rows]), rows


@pytest.mark.cuda
@DTYPES
def test_experts_on_a_gpu_have_the_same_bits_at_every_tp_and_in_any_company(dtype: torch.dtype) -> None:
    from phalanx.kernels.gpu import invariant as gpu

    tokens, top, number, hidden, inner = 90, 4, 16, 512, 384
    x, weights = randn(tokens, hidden, dtype=dtype), torch.rand(tokens, top, device="cuda")
    gate, up = (randn(number, inner, hidden, dtype=dtype) / 20 for _ in range(2))
    down = randn(number, hidden, inner, dtype=dtype) / 20
    chosen = torch.stack([torch.randperm(number)[:top] for _ in range(tokens)]).int().cuda()

    def share(ranks: int, rank: int, rows: slice, given: torch.dtype) -> Tensor:
        own = slice(rank * inner // ranks, (rank + 1) * inner // ranks)
        entering, leaving = torch.cat((gate[:, own], up[:, own]), 1), down[:, :, own].contiguous()
        return gpu.experts(x[rows], entering, leaving, weights[rows], chosen[rows], SILU, 8 // ranks, given)

    everything = slice(0, tokens)
    whole = share(1, 0, everything, dtype)
    held = ExpertWeights(torch.cat((gate, up), 1), down)
    wanted = fused_experts_torch(x, held, weights, chosen.long(), SILU, False)
    torch.testing.assert_close(whole, wanted, rtol=3e-2, atol=3e-2)
    for ranks in (2, 4, 8):
        parts = [share(ranks, rank, everything, torch.float32) for rank in range(ranks)]
        assert torch.equal(gpu.join_ranks(torch.cat(parts, 1), ranks, dtype), whole), ranks
    for rows in (slice(3, 4), slice(2, 18), slice(20, 84)):
        assert torch.equal(share(1, 0, rows, dtype), whole[rows]), rows


@pytest.mark.cuda
@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"), [(32, 8, 128, None), (20, 1, 64, 300), (4, 2, 40, None)]
)
def test_attention_on_a_gpu_has_the_same_bits_in_any_company(
    heads: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype
) -> None:
    from phalanx.kernels.gpu import invariant as gpu

    lengths, width, page = torch.randint(1, 2000, (40,)), 128, 16
    q = randn(40, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    cache = randn(40 * width, page, 2, kv_heads, dim, dtype=dtype)
    tables = torch.randperm(len(cache), device="cuda").view(40, width).int()
    rows = DecodeRows(tables, torch.arange(40, device="cuda"), (lengths - 1).cuda())
    whole = gpu.attention(q, cache, rows, window, False, dim**-0.5, None)
    masks = SightMasks(AttentionBatch(rows.positions, rows, prefills=[]), page, dtype)
    wanted = decode_attention_torch(q, cache, rows, masks.decode(Sight(window)), dim**-0.5)
    torch.testing.assert_close(whole, wanted, rtol=2e-2, atol=2e-2)
    for first, last in ((0, 1), (7, 8), (3, 35)):
        some = DecodeRows(tables, rows.slots[first:last], rows.positions[first:last])
        assert torch.equal(gpu.attention(q[first:last], cache, some, window, False, dim**-0.5, None), whole[first:last])
    if kv_heads > 1:
        half, own = heads // 2, cache[:, :, :, kv_heads // 2 :].contiguous()
        assert torch.equal(gpu.attention(q[:, half:], own, rows, window, False, dim**-0.5, None), whole[:, half:])
