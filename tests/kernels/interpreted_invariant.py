"""Products, experts and attention by the invariant Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, Sight, SightMasks, decode_attention_torch
from phalanx.kernels.gpu import invariant as gpu
from phalanx.kernels.gpu.gemm import Tile
from phalanx.kernels.invariant import product_torch
from phalanx.kernels.moe import ExpertWeights, fused_experts_torch
from phalanx.kernels.tiling import DecodeRows
from phalanx.spec.ffn import SILU
from tests.kernels.interpreter import make_ready

PAGE, UNITS = 8, 8
F32 = torch.float32


def over_ranks(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """What all ranks' parts come to, gathered."""
    return gpu.join_ranks(torch.cat(parts, 1), len(parts), dtype)


def check_product(dtype: torch.dtype, outputs: int, inputs: int, shared_by: tuple[int, ...]) -> None:
    """By one rank and by several, which hold whole units of the inner dimension; and each row in any company."""
    x, weight, bias = torch.randn(20, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    bias = bias.to(dtype)
    whole = gpu.product(x, weight, bias, UNITS, dtype)
    torch.testing.assert_close(whole, product_torch(x, weight, bias, UNITS, dtype))
    for ranks in shared_by:
        width = inputs // ranks
        parts = [
            gpu.product(own.contiguous(), columns.contiguous(), None if rank else bias, UNITS // ranks, F32)
            for rank, (own, columns) in enumerate(zip(x.split(width, 1), weight.split(width, 1), strict=True))
        ]
        assert torch.equal(over_ranks(parts, dtype), whole), (dtype, ranks)
    for rows in (slice(3, 4), slice(1, 19)):
        assert torch.equal(gpu.product(x[rows], weight, bias, UNITS, dtype), whole[rows])
    few, columns = gpu.product(x[:9], weight, bias, 2, dtype), slice(7, outputs)
    assert torch.equal(gpu.product(x[:5], weight[columns], bias[columns], 2, dtype), few[:5, columns])


def check_experts(dtype: torch.dtype) -> None:
    """By 1, 2 and 4 ranks, which hold whole units of every expert and of a shared one; and a token alone."""
    tokens, top, number, hidden, inner = 5, 2, 3, 48, 32
    x = torch.randn(tokens, hidden).to(dtype)
    gate, up = torch.randn(2, number, inner, hidden).to(dtype) / 7
    down = torch.randn(number, hidden, inner).to(dtype) / 6
    gated, always = torch.randn(tokens, inner).to(dtype), torch.randn(hidden, inner).to(dtype) / 6
    weights = torch.rand(tokens, top)
    chosen = torch.stack([torch.randperm(number)[:top] for _ in range(tokens)]).int()

    def share(ranks: int, rank: int, rows: slice, given: torch.dtype) -> Tensor:
        own = slice(rank * inner // ranks, (rank + 1) * inner // ranks)
        entering = torch.cat((gate[:, own], up[:, own]), 1).contiguous()
        leaving, units = down[:, :, own].contiguous(), 4 // ranks
        beside = gpu.unit_sums(gated[rows, own], always[:, own].contiguous(), None, units)
        return gpu.experts(x[rows], entering, leaving, weights[rows], chosen[rows], SILU, units, given, beside)

    everything = slice(0, tokens)
    whole = share(1, 0, everything, dtype)
    held = ExpertWeights(torch.cat((gate, up), 1), down)
    wanted = fused_experts_torch(x, held, weights, chosen.long(), SILU, False) + gated @ always.T
    torch.testing.assert_close(whole, wanted, rtol=0.03 if dtype != F32 else 1e-4, atol=0.03 if dtype != F32 else 1e-5)
    for ranks in (2, 4):
        assert torch.equal(over_ranks([share(ranks, rank, everything, F32) for rank in range(ranks)], dtype), whole)
    for rows in (slice(3, 4), slice(2, 5)):
        assert torch.equal(share(1, 0, rows, dtype), whole[rows])


def check_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, window: int | None, chunked: bool, sunk: bool
) -> None:
    """All rows at once, each alone, and the heads of each of two ranks."""
    lengths, dim, width = [300, 33], 16, 40
    q = torch.randn(len(lengths), heads + 2, dim).to(dtype)[:, :heads]
    cache = torch.randn(len(lengths) * width, PAGE, 2, kv_heads, dim).to(dtype)
    tables = torch.randperm(len(cache)).view(len(lengths), width).int()
    rows = DecodeRows(tables, torch.arange(len(lengths)), torch.tensor(lengths) - 1)
    sinks = torch.randn(heads) if sunk else None
    sight = Sight(window, chunked, sinks)
    whole = gpu.attention(q, cache, rows, window, chunked, 0.3, sinks)
    masks = SightMasks(AttentionBatch(rows.positions, rows, prefills=[]), PAGE, dtype)
    wanted = decode_attention_torch(q, cache, rows, masks.decode(sight), 0.3, sinks=sinks)
    torch.testing.assert_close(whole, wanted, rtol=0.02 if dtype != F32 else 1e-4, atol=0.02 if dtype != F32 else 1e-5)
    for row in (0, 1):
        alone = DecodeRows(tables, rows.slots[row : row + 1], rows.positions[row : row + 1])
        assert torch.equal(gpu.attention(q[row : row + 1], cache, alone, window, chunked, 0.3, sinks)[0], whole[row])
    if kv_heads > 1:
        half = heads // 2
        own = cache[:, :, :, kv_heads // 2 :].contiguous()
        share = gpu.attention(q[:, half:], own, rows, window, chunked, 0.3, None if sinks is None else sinks[half:])
        assert torch.equal(share, whole[:, half:])


def main() -> None:
    make_ready()
    torch.manual_seed(0)
    gpu.SPLITS = 4
    gpu.HALF_TILE = Tile(16, 32, 16, 4, 4)
    gpu.MOST_PART_BYTES, gpu.MOST_ATTENDING = 4 * UNITS * 37 * 32, 1  # several launches
    check_product(F32, 37, 160, (2, 8))
    check_product(torch.float16, 37, 160, (4,))  # the interpreter's products know no bfloat16
    check_experts(F32)
    check_attention(F32, 4, 2, None, False, False)
    check_attention(torch.float16, 4, 2, 100, False, True)
    check_attention(F32, 20, 1, 128, True, False)


if __name__ == "__main__":
    main()
