"""Weights of 4, 5 and 8 bits in panels: what they stand for bit for bit, and their products within rounding of x."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.panels import Panels, product, product_torch, rounded

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")

ROUNDING = {1: 5e-3, 2: 2e-5}
"""Of a product, to that of all its terms' sizes: x has 8 or 16 bits in each block of 32 columns."""
EPSILON = torch.finfo(torch.float32).eps
SIZES = [(144, 576), (16, 32), (17, 40), (33, 200), (7, 1000), (1, 1), (48, 31), (64, 320)]
"""Outputs and inputs: whole panels and blocks, and those at whose edges something is missing."""
KINDS = [
    *((bits, 1, torch.float16) for bits in (4, 5, 8)),
    *((4, 2, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)),
]
"""Bits of a code, bytes of an input, and what scales are in."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def of_groups(rows: int, columns: int, group: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(rows, -(-columns // group)) * 0.1 + 0.01).to(dtype)


def make(
    rows: int, columns: int, minimums: bool, group: int = 32, kind: tuple[int, int, torch.dtype] = KINDS[0]
) -> tuple[Panels, Tensor]:
    """Panels, and the matrix they stand for by plain arithmetic."""
    bits, planes, dtype = kind
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    signed = codes.view(torch.int8) if bits == 8 else codes
    scales = of_groups(rows, columns, group, dtype)
    least = -of_groups(rows, columns, group, dtype) if minimums else None
    shift = 0 if minimums or bits == 8 else 2 ** (bits - 1)
    wide = (signed.float() - shift) * scales.float().repeat_interleave(group, 1)[:, :columns]
    wide = wide if least is None else wide + least.float().repeat_interleave(group, 1)[:, :columns]
    return Panels.of(codes, scales, group, bits, shift, least, planes), wide


def order_of_sums(terms: int) -> float:
    """What the order of a sum of random terms may cost, relatively: one by one it is a fifth of this, in lanes less."""
    return EPSILON * terms**0.5


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}x{8 * kind[1]} {kind[2]}")
def test_panels_stand_for_their_matrix_and_multiply_as_it_does(
    rows: int, columns: int, kind: tuple[int, int, torch.dtype]
) -> None:
    planes = kind[1]
    for group, minimums in [(32, True), (64, False), (128, True)]:
        panels, wide = make(rows, columns, minimums, group, kind)
        assert torch.equal(panels.dequantised(torch.float32), wide)
        some = torch.randint(0, rows, (5,))
        assert torch.equal(panels.look_up(some), wide[some])
        bias = torch.randn(rows)
        for tokens in (1, 2, 3, 8):
            x = torch.randn(tokens, columns) * 3
            wanted, size = x.double() @ wide.double().t() + bias, x.abs() @ wide.abs().t() + bias.abs()
            taken = rounded(x, planes).double() @ wide.double().t() + bias
            found = product(x, panels, bias)
            assert float((found - wanted).norm() / size.norm()) < ROUNDING[planes]
            assert float((found - taken).norm() / size.norm()) < order_of_sums(columns + 1)
            assert float((product_torch(x, panels, bias) - taken).norm() / size.norm()) < order_of_sums(columns + 1)


@pytest.mark.parametrize("kind", KINDS[:4], ids=lambda kind: f"{kind[0]}x{8 * kind[1]}")
def test_numbers_that_its_bits_hold_lose_nothing(kind: tuple[int, int, torch.dtype]) -> None:
    """Whole numbers of 8 or 16 bits, one scale: only the sums are rounded, to float32."""
    largest = 127 if kind[1] == 1 else 32639
    panels, _ = make(40, 96, minimums=False, kind=kind)
    panels.scales.fill_(0.25)
    x = torch.randint(-largest, largest + 1, (3, 96)).float()
    x[:, ::32] = largest  # the largest of each block, by which its bits are dealt
    if kind[1] == 2:
        x = torch.where((x + 128) % 256 == 0, x + 1, x)  # no low byte is -128
    assert torch.allclose(rounded(x, kind[1]), x, rtol=1e-6)
    wanted = x.double() @ panels.dequantised(torch.float64).t()
    for tokens in (1, 3):
        assert relative(product(x[:tokens], panels, None), wanted[:tokens]) < order_of_sums(96)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=lambda kind: f"{8 * kind[1]} bits")
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: tuple[int, int, torch.dtype]) -> None:
    """But for the order of sums; more rows than stay near at once, and not a whole number of them."""
    panels, _ = make(64, 320, minimums=True, kind=kind)
    x = torch.randn(131, 320)
    together = product(x, panels, None)
    for row in (0, 1, 2, 6, 127, 128, 130):
        assert relative(product(x[row : row + 1], panels, None), together[row : row + 1].double()) < order_of_sums(320)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=lambda kind: f"{8 * kind[1]} bits")
def test_rows_of_zeros_and_of_tiny_numbers(kind: tuple[int, int, torch.dtype]) -> None:
    panels, wide = make(33, 64, minimums=True, kind=kind)
    assert torch.equal(product(torch.zeros(2, 64), panels, None), torch.zeros(2, 33))
    x = torch.randn(2, 64) * 1e-20
    assert relative(product(x, panels, None), rounded(x, kind[1]).double() @ wide.double().t()) < order_of_sums(64)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_e4m3(rows: int, columns: int) -> None:
    """Every number there is but NaN, subnormal ones too; x is not rounded."""
    codes = torch.randint(0, 127, (rows, columns), dtype=torch.uint8) | torch.randint(0, 2, (rows, columns)).byte() << 7
    values, scales = codes.view(torch.float8_e4m3fn), of_groups(rows, columns, 128, torch.float32)
    panels = Panels.of_e4m3(values, scales, 128)
    wide = values.float() * scales.repeat_interleave(128, 1)[:, :columns]
    assert torch.equal(panels.dequantised(torch.float32), wide)
    assert torch.equal(panels.look_up(torch.tensor([rows - 1, 0])), wide[[rows - 1, 0]])
    for tokens in (1, 2, 7, 40):
        x, bias = torch.randn(tokens, columns), torch.randn(rows)
        assert relative(product(x, panels, bias), x.double() @ wide.double().t() + bias) < order_of_sums(columns + 1)


def test_no_rows_and_no_outputs() -> None:
    panels, _ = make(16, 32, minimums=False)
    assert product(torch.empty(0, 32), panels, None).shape == (0, 16)
    none, _ = make(0, 32, minimums=False)
    assert product(torch.randn(2, 32), none, None).shape == (2, 0)
