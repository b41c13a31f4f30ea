"""Products of a few rows that stream their weight, on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from phalanx.kernels.fp8 import E4M3, Fp8Weight, dequantise
from phalanx.kernels.quantise import quantise
from tests.kernels.gluon_interpreter import interpreted
from tests.kernels.interpreter import backwards, make_ready

CASES = (
    (5, 8, 64, 1),
    (20, 32, 64, 2),
    (33, 64, 64, 1),
    (64, 64, 64, 3),
    (65, 64, 64, 2),
    (97, 64, 128, 1),
    (128, 128, 64, 1),
    (100, 128, 64, 2),
)
"""Rows, rows and outputs of a tile, and programs that share one."""


def main() -> None:
    """Tiles with all rows and with some, which may come twice, weights cut short on both sides."""
    make_ready()
    stream = interpreted("phalanx.kernels.gpu.stream")
    stream.multiprocessors = lambda device: 1
    torch.manual_seed(0)
    counter = torch.zeros(64, dtype=torch.int32)
    for rows, tile_rows, tile_outputs, splits in CASES:
        x, weight, bias = torch.randn(rows, 712).half(), torch.randn(152, 712).half(), torch.randn(152).half()
        cut, share = stream.cut(rows, 152, 712, False, tile_rows, tile_outputs, 0), -(-6 // splits)
        way = cut._replace(splits=splits, inputs=share * stream.step_of(False))
        wanted = x.double() @ weight.double().T + bias.double()
        for order in (nullcontext(), backwards()):
            with order:
                found = stream.stream_product(x, weight, bias, torch.float16, counter, way)
            assert (found.double() - wanted).norm() < 1e-3 * wanted.norm(), (rows, way)
            assert not counter.any(), "the next product finds no zeros"
    for rows, tile_rows, tile_outputs, splits in CASES[::2]:
        x, weight = quantise(torch.randn(rows, 1424)), Fp8Weight.empty(152, 1424, row_block=64, device=counter.device)
        weight.values.copy_(torch.randn(152, 1424).to(E4M3))
        weight.scales.uniform_(0.5, 2.0)
        cut, share = stream.cut(rows, 152, 1424, True, tile_rows, tile_outputs, 0), -(-6 // splits)
        way = cut._replace(splits=splits, inputs=share * stream.step_of(True))
        wanted = dequantise(*x, 1, torch.float64) @ weight.dequantised(torch.float64).T
        found = stream.stream_product(x, weight, None, torch.float16, counter, way)
        assert (found.double() - wanted).norm() < 1e-3 * wanted.norm(), (rows, way)


if __name__ == "__main__":
    main()
