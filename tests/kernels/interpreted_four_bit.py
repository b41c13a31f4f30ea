"""Products with weights of four bits by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.four_bit import FourBitWeight
from phalanx.kernels.gemm import four_bit_product_torch
from phalanx.kernels.gpu import four_bit, moe
from phalanx.kernels.gpu.gemm import Tile
from phalanx.kernels.gpu.rows import sum_pairs
from phalanx.kernels.moe import ExpertWeights, fused_experts_torch
from phalanx.quant import at_work
from phalanx.spec.ffn import SILU, Activation
from phalanx.spec.schemes import DEFAULTS, Scheme, awq, gptq, packed_int4
from tests.kernels.interpreter import make_ready

CPU = torch.device("cpu")
SMALL = Tile(16, 32, 64, 1, 1, 4)
SCHEMES: tuple[tuple[Scheme, int], ...] = (
    (awq(128), 384),
    (awq(32), 160),
    (gptq(64, 1), 192),
    (packed_int4(96, True, "bf16"), 288),
    (packed_int4(None, True, "fp32"), 200),
    (packed_int4(64, False, "fp16"), 320),
    (DEFAULTS["mxfp4"], 32),
    (DEFAULTS["mxfp4"], 224),
    (DEFAULTS["nvfp4"], 48),
    (DEFAULTS["nvfp4"], 272),
)


def weight_of(scheme: Scheme, *shape: int) -> FourBitWeight:
    *stack, rows, columns = shape
    weight = at_work(scheme).empty(tuple(stack), [rows], columns, CPU)
    assert isinstance(weight, FourBitWeight)
    for index in range(stack[0] if stack else 1):
        at_work(scheme).round(weight[index] if stack else weight, torch.randn(rows, columns) * 0.1)
    return weight


def close(found: Tensor, wanted: Tensor) -> None:
    assert not found.isnan().any()
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < 1e-2, float(error)


def check_products() -> None:
    """Tiles and groups cut short on every side, split over the inputs or not, with and without bias."""
    for number, (scheme, columns) in enumerate(SCHEMES):
        few = weight_of(scheme, 3, columns)
        assert torch.equal(four_bit.widen(few, torch.float32), few.dequantised(torch.float32)), scheme.kind
        rows, outputs = 17, 33
        weight = weight_of(scheme, outputs, columns)
        dtype, bias = torch.float16 if number % 3 else torch.float32, torch.randn(outputs) if number % 2 else None
        x, bias = torch.randn(rows, columns).to(dtype), None if bias is None else bias.to(dtype)
        wanted = four_bit_product_torch(x.double(), weight, None if bias is None else bias.double())
        close(four_bit.run_tiles(x, weight, bias, SMALL), wanted)


def check_experts(scheme: Scheme, inner: int, activation: Activation, biased: bool, weighs_input: bool) -> None:
    tokens, experts, top, hidden = 5, 3, 2, 64
    gate_up, down = weight_of(scheme, experts, 2 * inner, hidden), weight_of(scheme, experts, hidden, inner)
    biases = (torch.randn(experts, 2 * inner), torch.randn(experts, hidden)) if biased else (None, None)
    x = torch.randn(tokens, hidden).half()
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)])
    weights = torch.rand(tokens, top)
    wide = ExpertWeights(gate_up.dequantised(torch.float32), down.dequantised(torch.float32), *biases)
    wanted = fused_experts_torch(x.float(), wide, weights, chosen, activation, weighs_input)
    for experts_format in ((gate_up, down), (wide.gate_up.half(), wide.down.half())):  # type: ignore[union-attr]
        given = zip(experts_format, biases, strict=True)
        close(sum_pairs(moe.expert_pairs(x, *given, weights, chosen.int(), activation, weighs_input)), wanted)


def main() -> None:
    make_ready()
    torch.manual_seed(0)
    four_bit.LEAST_ROUNDS = 1
    check_products()
    four_bit.GROUPED_TILES = {16: SMALL}
    moe.BF16_TILES = {16: Tile(16, 32, 64, 1, 1)}
    check_experts(DEFAULTS["mxfp4"], 96, Activation("clamped", 0.5), biased=True, weighs_input=False)
    check_experts(awq(32), 32, SILU, biased=False, weighs_input=True)
    check_experts(DEFAULTS["nvfp4"], 48, Activation("gelu"), biased=False, weighs_input=False)


if __name__ == "__main__":
    main()
