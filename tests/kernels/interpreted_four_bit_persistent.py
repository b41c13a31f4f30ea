"""Products with weights of four bits by programs that stay, on a CPU; run with TRITON_INTERPRET=1.

How numbers are widened, which is a GPU's assembly, is not looked at.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import TensorHandle

from phalanx.kernels.four_bit import FourBitWeight, Groups, scale_values, unpack
from tests.kernels.gluon_interpreter import Memory, interpreted
from tests.kernels.interpreter import backwards, make_ready


class Widening:
    """Stands for what is in registers: half a step of 64 outputs, by its definition."""

    def __init__(self, numbers: str) -> None:
        self.numbers = numbers

    def tile_of(self, memory: Memory, kind: tl.dtype, outputs: int, each: int) -> Memory:
        bits = np.ascontiguousarray(memory.held).view(np.uint8).reshape(outputs, each, -1)
        if kind != tl.uint8:
            return Memory(kind, bits.view(np.float16)[..., 0])
        return Memory(kind, bits[..., 0])

    def widened(self, units: Memory, scales: Memory, zeros: Memory, *rest: Any) -> tl.tensor:
        has_zeros, sums, half = rest[2], rest[3], rest[6]
        codes = unpack(torch.from_numpy(units.held.copy()).view(torch.uint8), units.shape[1] * 4, self.numbers)
        each = scales.shape[1]
        groups = Groups(codes, torch.from_numpy(scales.held.copy()), codes.shape[1] // each)
        signed = _numbers(groups, torch.from_numpy(zeros.held.copy()) if has_zeros else None, self.numbers)
        found = signed if sums else signed * groups.spread(scale_values(groups.scales))
        if self.numbers == "e2m1":
            found = found * 2.0**-32
        found = found.chunk(2, 1)[half].numpy()
        return tl.tensor(TensorHandle(found, tl.float32), tl.block_type(tl.float32, list(found.shape)))


def _numbers(groups: Groups, zeros: Tensor | None, numbers: Any) -> Tensor:
    from phalanx.kernels.four_bit import numbers_of

    return numbers_of(groups.codes, numbers, None if zeros is None else groups.spread(zeros))


def weight_of(kind: str, *shape: int) -> FourBitWeight:
    is_int = kind == "int4"
    weight = FourBitWeight.empty(
        *shape, numbers=kind, group=128 if is_int else 32, scale_dtype=torch.float16 if is_int else torch.uint8,
        zeros=is_int, factors=False, device=torch.device("cpu"),
    )  # fmt: skip
    weight.values.random_(0, 256)
    if weight.zeros is not None:
        weight.zeros.random_(0, 16)
        weight.scales.uniform_(-0.05, 0.05)
    else:
        weight.scales.random_(120, 126)
    return weight


def close(found: Tensor, wanted: Tensor, most: float = 2e-3) -> None:
    assert not found.isnan().any()
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < most, float(error)


def sorted_pairs(chosen: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """As `sort_by_expert` leaves them, with tiles that are nobody's behind."""
    pairs = chosen.numel()
    order, owner = [], []
    for expert in range(experts):
        mine = (chosen.flatten() == expert).nonzero().flatten().tolist()
        tiles = -(-len(mine) // rows)
        order += mine + [pairs] * (tiles * rows - len(mine))
        owner += [expert] * tiles
    order, owner = order + [pairs] * (2 * rows), owner + [-1] * 2
    return torch.tensor(order, dtype=torch.int32), torch.tensor(owner, dtype=torch.int32)


def check_experts(stays: ModuleType, tokens: int, outputs: int, inputs: int, way: Any, programs: int) -> None:
    experts, top = 5, 2
    weight, bias = weight_of("e2m1", experts, outputs, inputs), torch.randn(experts, outputs).half()
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)])
    wide, owners = weight.dequantised(torch.float64), chosen.flatten()
    for a_row in (top, 1):
        x = torch.randn(tokens * top // a_row, inputs).half()
        weights = torch.rand(tokens, top) if a_row == 1 else None
        wanted = torch.einsum("pk,pok->po", x.double()[torch.arange(tokens * top) // a_row], wide[owners])
        wanted += bias.double()[owners]
        wanted = wanted if weights is None else wanted * weights.flatten()[:, None]
        order, owner = sorted_pairs(chosen, experts, way.rows)
        out, counter = torch.full((tokens * top, outputs), torch.nan).half(), torch.zeros(128, dtype=torch.int32)
        stays.launch(x, weight, bias, out, way, programs, counter, order, owner, weights, a_row, placed=a_row == 1)
        close(out, wanted)
        assert not counter.any(), "the next product finds no zeros"


def check_one(stays: ModuleType, rows: int, outputs: int, inputs: int, way: Any, programs: int) -> None:
    weight, x = weight_of("int4", outputs, inputs), torch.randn(rows, inputs).half()
    out, counter = torch.full((rows, outputs), torch.nan).half(), torch.zeros(128, dtype=torch.int32)
    stays.launch(x, weight, None, out, way, programs, counter, None, None, None, 1)
    close(out, x.double() @ weight.dequantised(torch.float64).T)
    assert not counter.any(), "the next product finds no zeros"


def main() -> None:
    """Shares that begin and end within tiles, tiles that several have a part of, sizes cut short on every side."""
    make_ready()
    stays = interpreted("phalanx.kernels.gpu.four_bit_persistent")
    torch.manual_seed(0)
    widening = Widening("e2m1")
    stays.tile_of, stays.widened = widening.tile_of, widening.widened
    stays.LEAST_STEPS = 1
    for parts, programs in ((3, 3), (2, 29)):
        check_experts(stays, 60, 208, 288 + 256 * parts, stays.Stay(32, parts), programs)
    with backwards():
        check_experts(stays, 11, 144, 832, stays.Stay(32, 3), 7)
        check_experts(stays, 11, 144, 832, stays.Stay(8, 2, 2), 7)
    widening.numbers = "int4"
    for rows, size, parts, programs in ((20, 16, 3, 5), (20, 32, 3, 5), (5, 8, 2, 1), (70, 64, 2, 4), (33, 16, 3, 30)):
        check_one(stays, rows, 208, 1152, stays.Stay(size, parts), programs)


if __name__ == "__main__":
    main()
