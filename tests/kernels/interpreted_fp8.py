"""Products with FP8 weights as cards that do not convert e4m3 compute them, and float32 in parts, on a CPU; run with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.kernels.fp8 import E4M3, Fp8Weight
from phalanx.kernels.gpu import gemm, moe, rows
from phalanx.kernels.moe import ExpertWeights, fused_experts_torch
from phalanx.spec.ffn import SILU
from tests.kernels.interpreter import make_ready


def weight_of(*shape: int, row_block: int) -> Fp8Weight:
    """All numbers there are, the smallest too."""
    weight = Fp8Weight.empty(*shape, row_block=row_block, device=torch.device("cpu"))
    numbers = torch.arange(256, dtype=torch.uint8)
    known = numbers[(numbers & 0x7F) != 0x7F].view(E4M3)
    weight.values.copy_(known.view(torch.uint8)[torch.randint(len(known), shape)].view(E4M3))
    weight.scales.copy_(torch.rand(weight.scales.shape) * 0.01)
    return weight


def check_product(count: int, outputs: int, inputs: int, row_block: int, bias: bool) -> None:
    x, weight = torch.randn(count, inputs), weight_of(outputs, inputs, row_block=row_block)
    added = torch.randn(outputs) if bias else None
    wanted = F.linear(x, weight.dequantised(torch.float32), added)
    torch.testing.assert_close(gemm.widened_product(x, weight, added), wanted, rtol=1e-4, atol=1e-4)


def check_experts(tokens: int, hidden: int, inner: int) -> None:
    gate_up, down = weight_of(3, 2 * inner, hidden, row_block=32), weight_of(3, hidden, inner, row_block=32)
    gate_up.scales.mul_(0.1)
    weights, chosen = torch.rand(tokens, 2), torch.rand(tokens, 3).argsort(1)[:, :2].int()
    x = torch.randn(tokens, hidden)
    found = rows.sum_pairs(moe.expert_pairs(x, (gate_up, None), (down, None), weights, chosen, SILU, False))
    held = ExpertWeights(gate_up.dequantised(torch.float32), down.dequantised(torch.float32))
    wanted = fused_experts_torch(x, held, weights, chosen, SILU, False)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-2)


def check_parts() -> None:
    weight = torch.randn(7, 300) * torch.logspace(-6, 6, 300)
    parts = gemm.take_apart(weight).unflatten(0, (3, 7)).double()
    assert torch.equal(parts.sum(0), weight.double())


def main() -> None:
    make_ready()
    torch.manual_seed(0)
    check_parts()
    check_product(1, 70, 300, 32, bias=True)
    check_product(17, 64, 128, 128, bias=False)
    gemm.LEAST_ROUNDS = 1
    check_product(3, 40, 520, 1, bias=True)
    moe.converts_e4m3 = lambda device: False
    check_experts(5, 140, 72)
    moe.WIDENED_TILES = moe.FP8_TILES
    check_experts(5, 530, 300)


if __name__ == "__main__":
    main()
