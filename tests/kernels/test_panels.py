"""Weights of 4, 5 and 8 bits in panels: what they stand for bit for bit, and their products within rounding of x."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.invariant import tree_sum
from phalanx.kernels.panels import Panels, product, product_torch, unit_sums

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")

ROUNDING = 2e-5
"""Of a product, to that of all its terms' sizes: x has 16 bits in each block of 32 columns."""
EPSILON = torch.finfo(torch.float32).eps
SIZES = [(144, 576), (16, 32), (17, 40), (33, 200), (7, 1000), (1, 1), (48, 31), (64, 320)]
"""Outputs and inputs: whole panels and blocks, and those at whose edges something is missing."""
SCALES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def of_groups(rows: int, columns: int, group: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(rows, -(-columns // group)) * 0.1 + 0.01).to(dtype)


def make(rows: int, columns: int, bits: int, group: int, dtype: torch.dtype, minimums: bool) -> tuple[Panels, Tensor]:
    """Panels, and the matrix they stand for by plain arithmetic."""
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    signed = codes.view(torch.int8) if bits == 8 else codes
    scales = of_groups(rows, columns, group, dtype)
    least = -of_groups(rows, columns, group, dtype) if minimums else None
    shift = 0 if minimums or bits == 8 else 2 ** (bits - 1)
    wide = (signed.float() - shift) * scales.float().repeat_interleave(group, 1)[:, :columns]
    wide = wide if least is None else wide + least.float().repeat_interleave(group, 1)[:, :columns]
    return Panels.of(codes, scales, group, bits, shift, least), wide


def order_of_sums(terms: int) -> float:
    """What the order of a sum of random terms may cost, relatively: one by one it is a fifth of this, in lanes less."""
    return EPSILON * terms**0.5


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_panels_stand_for_their_matrix_and_multiply_as_it_does(rows: int, columns: int, bits: int) -> None:
    for group, dtype, minimums in [(32, SCALES[0], True), (64, SCALES[1], False), (128, SCALES[2], True)]:
        panels, wide = make(rows, columns, bits, group, dtype, minimums)
        assert torch.equal(panels.dequantised(torch.float32), wide)
        some = torch.randint(0, rows, (5,))
        assert torch.equal(panels.look_up(some), wide[some])
        bias = torch.randn(rows)
        for tokens in (1, 2, 3, 8):
            x = torch.randn(tokens, columns) * 3
            wanted, size = x.double() @ wide.double().t() + bias, x.abs() @ wide.abs().t() + bias.abs()
            assert float((product(x, panels, bias) - wanted).norm() / size.norm()) < ROUNDING
            assert float((product_torch(x, panels, bias) - wanted).norm() / size.norm()) < order_of_sums(columns + 1)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_numbers_that_16_bits_hold_lose_nothing(bits: int) -> None:
    """Whole numbers of 16 bits, one scale: only the sums are rounded, to float32."""
    panels, _ = make(40, 96, bits, 32, torch.float16, minimums=False)
    panels.scales.fill_(0.25)
    x = torch.randint(-32639, 32640, (3, 96)).float()
    x[:, ::32] = 32639  # the largest of each block, by which its 16 bits are dealt
    x = torch.where((x + 128) % 256 == 0, x + 1, x)  # no low byte is -128
    wanted = x.double() @ panels.dequantised(torch.float64).t()
    for tokens in (1, 3):
        assert relative(product(x[:tokens], panels, None), wanted[:tokens]) < order_of_sums(96)


@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(bits: int, minimums: bool) -> None:
    """Several kernels share the rows of a product among them: a few have their own, others go by up to twelve."""
    panels, _ = make(72, 320, bits, 32, torch.float16, minimums)
    x = torch.randn(31, 320)
    alone = torch.cat([product(row[None], panels, None) for row in x])
    for count in (*range(2, 18), 20, 24, 31):
        assert torch.equal(product(x[:count], panels, None), alone[:count])


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_units_are_added_up_as_a_tree(bits: int) -> None:
    """By every kernel; groups of a block, of two, and of whole rows."""
    for group, dtype, minimums in [(32, SCALES[0], True), (64, SCALES[1], False), (512, SCALES[2], True)]:
        panels, wide = make(40, 512, bits, group, dtype, minimums)
        cut, x, bias = replace(panels, units=8), torch.randn(31, 512), torch.randn(40)
        tree = tree_sum(list(unit_sums(x, cut, bias)))
        assert relative(tree, x.double() @ wide.double().t() + bias) < 5 * ROUNDING
        assert not torch.equal(tree, product(x, panels, bias))
        for rows in (slice(0, 31), slice(0, 11), slice(2, 3), slice(3, 5), slice(5, 8)):
            assert torch.equal(product(x[rows], cut, bias), tree[rows])


def test_rows_of_zeros_and_of_tiny_numbers() -> None:
    panels, wide = make(33, 64, 4, 32, torch.float16, minimums=True)
    assert torch.equal(product(torch.zeros(2, 64), panels, None), torch.zeros(2, 33))
    x = torch.randn(2, 64) * 1e-20
    assert relative(product(x, panels, None), x.double() @ wide.double().t()) < 5 * ROUNDING


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
    panels, _ = make(16, 32, 4, 32, torch.float16, minimums=False)
    assert product(torch.empty(0, 32), panels, None).shape == (0, 16)
    none, _ = make(0, 32, 4, 32, torch.float16, minimums=False)
    assert product(torch.randn(2, 32), none, None).shape == (2, 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_seen(number: float) -> None:
    """The kernels would make numbers of them."""
    codes, scales = torch.ones(16, 32, dtype=torch.uint8), torch.ones(16, 1)
    spoilt = scales.clone()
    spoilt[5] = number
    assert Panels.of(codes, scales, 32, 4, 0, scales).is_finite
    assert not Panels.of(codes, spoilt, 32, 4).is_finite
    assert not Panels.of(codes, scales, 32, 4, 0, spoilt).is_finite
    assert Panels.of(codes + 126, scales, 32, 8).is_finite
    assert not Panels.of_e4m3(codes.float().to(torch.float8_e4m3fn), spoilt, 32).is_finite


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_of_e4m3_that_are_no_numbers_are_seen(code: int) -> None:
    codes = torch.ones(16, 32).to(torch.float8_e4m3fn)
    assert Panels.of_e4m3(codes, torch.ones(16, 1), 32).is_finite
    codes.view(torch.uint8)[7, 9] = code
    assert not Panels.of_e4m3(codes, torch.ones(16, 1), 32).is_finite
