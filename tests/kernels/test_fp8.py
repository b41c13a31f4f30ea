"""Block FP8 by its definition: what the Triton kernels are compared with, itself compared with plain loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.activation import silu_and_mul, silu_and_mul_quantised
from phalanx.kernels.fp8 import Fp8Weight, dequantise, quantise_blocks, row_block_of
from phalanx.kernels.gemm import Fp8Gemm, fp8_product_torch
from phalanx.kernels.moe import ExpertWeights, fused_experts, fused_experts_torch, route
from phalanx.kernels.norm import add_rms_norm, add_rms_norm_quantised
from phalanx.kernels.quantise import quantise
from phalanx.kernels.sampling import likeliest
from phalanx.spec.ffn import SILU, Router
from tests.kernels.apart import run_apart

CPU = torch.device("cpu")
STEP = 2.0**-4
"""Half the distance between neighbours of e4m3, relative to the smaller of them."""


def stacked(parts: list[int], inputs: int) -> tuple[Fp8Weight, Tensor]:
    """Matrices as one weight, and what they stand for, tile by tile."""
    weight = Fp8Weight.empty(sum(parts), inputs, row_block=row_block_of(parts), device=CPU)
    meant = []
    for part, rows in zip(weight.split(parts), parts, strict=True):
        values, scales = quantise_blocks(torch.randn(rows, inputs))
        part.fill(values, scales)
        wide = values.float()
        for row in range(rows):
            for column in range(0, inputs, 128):
                wide[row, column : column + 128] *= scales[row // 128, column // 128]
        meant.append(wide)
    return weight, torch.cat(meant)


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (5, 300), (3, 7)])
def test_each_group_of_128_columns_has_its_own_scale(rows: int, width: int) -> None:
    x = torch.randn(rows, width) * torch.logspace(-3, 3, width)
    found = quantise(x)
    for row in range(rows):
        for group in range(-(-width // 128)):
            span = slice(group * 128, (group + 1) * 128)
            assert found.scales[row, group] == pytest.approx(float(x[row, span].abs().max()) / 448)
            meant = found.values[row, span].float() * found.scales[row, group]
            limit = x[row, span].abs() * STEP + found.scales[row, group] * 2**-9
            assert ((meant - x[row, span]).abs() <= limit * 1.001).all()
    assert found.scales.t().is_contiguous()
    assert found.values.is_contiguous()


def test_a_row_of_zeros_stays_zero() -> None:
    found = quantise(torch.zeros(2, 130))
    assert dequantise(found.values, found.scales, 1, torch.float32).count_nonzero() == 0


@pytest.mark.parametrize(("shape"), [(128, 128), (300, 200), (1, 1)])
def test_tiles_keep_their_largest_value(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    values, scales = quantise_blocks(weight)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    wide = dequantise(values, scales, 128, torch.float32)
    assert ((wide - weight).abs() <= weight.abs() * STEP + scales.max() * 2**-9).all()
    assert wide.abs().max() == pytest.approx(float(weight.abs().max()), rel=1e-6)


@pytest.mark.parametrize(
    ("parts", "block"),
    [([512], 128), ([256, 128], 128), ([128, 200], 128), ([600, 600], 8), ([57, 3], 1), ([96, 64], 32)],
)
def test_stacked_matrices_keep_their_own_tiles(parts: list[int], block: int) -> None:
    weight, meant = stacked(parts, 200)
    assert weight.row_block == block
    assert torch.equal(weight.dequantised(torch.float32), meant)


def test_a_product_in_float32_is_that_of_the_widened_weight() -> None:
    weight, meant = stacked([128, 72], 300)
    x, bias = torch.randn(5, 300), torch.randn(200)
    product = Fp8Gemm(weight, bias, torch.float32)
    assert not product.takes_fp8
    torch.testing.assert_close(product(x), F.linear(x, meant, bias))


def test_a_product_in_half_precision_takes_its_input_in_fp8() -> None:
    weight, meant = stacked([128, 72], 300)
    x, bias = torch.randn(5, 300).bfloat16(), torch.randn(200).bfloat16()
    product = Fp8Gemm(weight, bias, torch.bfloat16)
    assert product.takes_fp8
    rounded = quantise(x)
    assert torch.equal(product(x), product(rounded))
    wide = dequantise(rounded.values, rounded.scales, 1, torch.float64)
    exact = F.linear(wide, meant.double(), bias.double())
    assert (product(x).double() - exact).norm() < 1e-2 * exact.norm()
    assert torch.equal(product(x), fp8_product_torch(rounded, weight, bias, torch.bfloat16))


def test_a_kernel_widens_weights_for_cards_that_do_not_convert_them() -> None:
    """In Triton's interpreter."""
    run_apart("interpreted_fp8")


def test_norm_and_gate_may_leave_in_fp8() -> None:
    x, residual, weight = torch.randn(3, 300), torch.randn(3, 300), torch.randn(300)
    twin = residual.clone()
    for found, wanted in zip(
        add_rms_norm_quantised(x, residual, weight, 1e-5), quantise(add_rms_norm(x, twin, weight, 1e-5)), strict=True
    ):
        assert torch.equal(found, wanted)
    assert torch.equal(residual, twin)
    for found, wanted in zip(silu_and_mul_quantised(x), quantise(silu_and_mul(x)), strict=True):
        assert torch.equal(found, wanted)


def test_experts_in_fp8_are_the_widened_ones_on_a_cpu() -> None:
    experts, inner, hidden = 4, 72, 144
    gate_up = Fp8Weight.empty(experts, 2 * inner, hidden, row_block=row_block_of([inner, inner]), device=CPU)
    down = Fp8Weight.empty(experts, hidden, inner, row_block=128, device=CPU)
    for expert in range(experts):
        for part in gate_up[expert].split([inner, inner]):
            part.fill(*quantise_blocks(torch.randn(inner, hidden)))
        down[expert].fill(*quantise_blocks(torch.randn(hidden, inner)))
    x = torch.randn(6, hidden)
    weights, chosen = route(torch.randn(6, experts), Router(experts, 2, renormalise=True))
    wide = gate_up.dequantised(torch.float32), down.dequantised(torch.float32)
    wanted = fused_experts_torch(x, ExpertWeights(*wide), weights, chosen, SILU, False)
    assert torch.equal(fused_experts(x, ExpertWeights(gate_up, down), weights, chosen), wanted)
    assert wide[0].shape == (experts, 2 * inner, hidden)


def test_the_likeliest_is_the_first_of_the_largest() -> None:
    assert likeliest(torch.tensor([[1.0, 3.0, 2.0], [-5.0, -4.0, -9.0]])).tolist() == [1, 1]
