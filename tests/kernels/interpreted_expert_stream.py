"""Products of experts of few tokens that stream their weights, on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from phalanx.kernels.fp8 import E4M3, Fp8Weight, Quantised, dequantise
from phalanx.kernels.quantise import quantise
from tests.kernels.gluon_interpreter import interpreted
from tests.kernels.interpreted_four_bit_persistent import close, sorted_pairs
from tests.kernels.interpreter import backwards, make_ready

EXPERTS, TOP = 5, 2


def weight_of(outputs: int, inputs: int, in_fp8: bool) -> Tensor | Fp8Weight:
    wide = torch.randn(EXPERTS, outputs, inputs)
    if not in_fp8:
        return wide.half()
    weight = Fp8Weight.empty(EXPERTS, outputs, inputs, row_block=64, device=torch.device("cpu"))
    weight.values.copy_(wide.to(E4M3))
    weight.scales.uniform_(0.5, 2.0)
    return weight


def check(stream: ModuleType, tokens: int, outputs: int, inputs: int, tile: int, in_fp8: bool) -> None:
    """Both products of experts: of one row for all of a token, with a bias, and of a row for each, which has a weight.

    Tiles with few pairs, and two that are nobody's.
    """
    weight = weight_of(outputs, inputs, in_fp8)
    wide = weight.dequantised(torch.float64) if isinstance(weight, Fp8Weight) else weight.double()
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(tokens)])
    order, owner = sorted_pairs(chosen, EXPERTS, tile)
    for a_row, bias in ((TOP, torch.randn(EXPERTS, outputs).half()), (1, None)):
        x: Tensor | Quantised = torch.randn(tokens * TOP // a_row, inputs).half()
        exact = x.double()
        if in_fp8:
            x = quantise(x)
            exact = dequantise(*x, 1, torch.float64)
        weights = torch.rand(tokens, TOP) if bias is None else None
        wanted = torch.einsum("pk,pok->po", exact[torch.arange(tokens * TOP) // a_row], wide[chosen.flatten()])
        wanted += 0 if bias is None else bias.double()[chosen.flatten()]
        wanted *= 1 if weights is None else weights.flatten()[:, None]
        out = torch.full((tokens * TOP, outputs), torch.nan).half()
        stream.product(x, weight, bias, order, owner, a_row, weights, out, tile, placed=bias is None)
        close(out, wanted)


def main() -> None:
    """Sizes cut short on both sides, one copy in flight and several."""
    make_ready()
    stream = interpreted("phalanx.kernels.gpu.expert_stream")
    torch.manual_seed(0)
    for in_fp8 in (False, True):
        check(stream, 3, 152, 712, 8, in_fp8)
        with backwards():
            check(stream, 9, 64, 1424, 16, in_fp8)
        check(stream, 40, 72, 208, 32, in_fp8)


if __name__ == "__main__":
    main()
