"""Products of experts of many tokens, on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from phalanx.kernels.activation import gate_and_mul
from phalanx.kernels.fp8 import E4M3, Fp8Weight, Quantised, dequantise
from phalanx.kernels.quantise import quantise
from phalanx.spec.ffn import SILU, Activation
from tests.kernels.gluon_interpreter import interpreted
from tests.kernels.interpreted_four_bit_persistent import close, sorted_pairs
from tests.kernels.interpreter import backwards, make_ready

EXPERTS, TOP = 3, 2


def stack_of(outputs: int, inputs: int, in_fp8: bool) -> Tensor | Fp8Weight:
    wide = torch.randn(EXPERTS, outputs, inputs)
    if not in_fp8:
        return (wide / 8).half()
    weight = Fp8Weight.empty(EXPERTS, outputs, inputs, row_block=128, device=torch.device("cpu"))
    weight.values.copy_((wide * 8).to(E4M3))
    weight.scales.uniform_(0.005, 0.02)
    return weight


def exactly(given: Tensor | Quantised | Fp8Weight) -> Tensor:
    if isinstance(given, Fp8Weight):
        return given.dequantised(torch.float64)
    return dequantise(*given, 1, torch.float64) if isinstance(given, Quantised) else given.double()


def check(
    prompts: ModuleType,
    tokens: int,
    hidden: int,
    inner: int,
    programs: int,
    in_fp8: bool,
    activation: Activation = SILU,
) -> None:
    """Rows of tokens, with weights, and rows of pairs, without. Two tiles are nobody's."""
    prompts.multiprocessors = lambda device: programs
    gate_up, down = stack_of(2 * inner, hidden, in_fp8), stack_of(hidden, inner, in_fp8)
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(tokens)])
    owners, (order, owner) = chosen.flatten(), sorted_pairs(chosen, EXPERTS, prompts.ROWS)
    for a_row in (TOP, 1):
        plain = torch.randn(tokens * TOP // a_row, hidden).half()
        x = quantise(plain) if in_fp8 else plain
        weights = torch.rand(tokens, TOP) if a_row == TOP else None
        taken = exactly(x)[torch.arange(tokens * TOP) // a_row]
        between = gate_and_mul(torch.einsum("pk,pok->po", taken, exactly(gate_up)[owners]).half(), activation)
        wanted = torch.einsum("pk,pok->po", exactly(quantise(between) if in_fp8 else between), exactly(down)[owners])
        wanted *= 1 if weights is None else weights.flatten()[:, None]
        out = torch.full((tokens * TOP, hidden), torch.nan).half()
        prompts.product(x, gate_up, down, order, owner, a_row, weights, out, activation)
        close(out, wanted, 8e-3 if in_fp8 else 2e-3)


def main() -> None:
    """More programs than tiles and fewer, outputs of a whole and of half a tile, inputs and outputs cut short."""
    make_ready()
    prompts = interpreted("phalanx.kernels.gpu.expert_prompts")
    torch.manual_seed(0)
    check(prompts, 3, 256, 128, 9, in_fp8=True)
    check(prompts, 200, 400, 128, 2, in_fp8=True)
    check(prompts, 100, 208, 48, 2, in_fp8=False)
    with backwards():
        check(prompts, 70, 144, 256, 3, True, Activation("clamped", 7.0))
        check(prompts, 70, 336, 208, 3, False, Activation("gelu"))


if __name__ == "__main__":
    main()
