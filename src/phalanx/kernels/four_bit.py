"""Weights of four bits: whole numbers or e2m1, with a scale for each group of columns of a row."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.panels import Panels

BLOCK = 32
"""Columns whose numbers lie together, in eight times sixteen bits: number i of these holds columns i, i + 8, i + 16 and
i + 24, which is how tensor cores want them dealt to threads."""
EIGHTH = BLOCK // 4
HALF = BLOCK // 2
STEP = 256
"""Columns whose scales lie together, row after row."""
MIDDLE = 8
"""The zero of whole numbers that have no zero points."""

ROUNDED_GROUP = 128
ROWS_AT_ONCE = 1024
"""Of a matrix that is rounded: what that takes beside it stays small."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Numbers = Literal["int4", "e2m1"]

PLACES = {
    "int4": (((15, 0),), ((15, 4),), ((15, 8),), ((15, 12),)),
    "e2m1": (((7, 6), (8, 12)), ((7, 3), (8, 9)), ((7, 0), (8, 6)), ((3, 13), (12, 8))),
}
"""Where each of four numbers is in sixteen bits: which of its bits are moved up by how many. Those of e2m1 are where
bfloat16 has them too, or a shift away; the bits of the fourth, which are left, a shift and a multiplication."""


class Groups(NamedTuple):
    """A matrix by its codes [rows, columns] and what each group of `width` columns has: scales and zero points.

    The first group may have lost its first `cut` columns. `factor` multiplies, or divides, all scales.
    """

    codes: Tensor
    scales: Tensor
    width: int
    zeros: Tensor | None = None
    factor: Tensor | None = None
    divides: bool = False
    cut: int = 0

    def spread(self, of_groups: Tensor) -> Tensor:
        """What each group has, for each of its columns."""
        return of_groups.repeat_interleave(self.width, 1)[:, self.cut : self.cut + self.codes.shape[1]]

    def rows(self, order: Tensor) -> Groups:
        """With its rows in another order."""
        zeros = None if self.zeros is None else self.zeros[order]
        return self._replace(codes=self.codes[order], scales=reordered(self.scales, order), zeros=zeros)


def reordered(rows: Tensor, order: Tensor) -> Tensor:
    """Rows in another order, of whichever dtype."""
    is_byte = rows.is_floating_point() and rows.element_size() == 1
    return rows.view(torch.uint8)[order].view(rows.dtype) if is_byte else rows[order]


def numbers_of(codes: Tensor, numbers: Numbers, zeros: Tensor | None) -> Tensor:
    """What codes stand for before they are scaled, in float32."""
    if numbers == "int4":
        return codes.float() - (MIDDLE if zeros is None else zeros.float())
    table = torch.tensor([*E2M1, *(-number for number in E2M1)], device=codes.device)
    return table[codes.long()]


def widen(groups: Groups, numbers: Numbers) -> Tensor:
    """float32: every number times the scale of its group."""
    scales = scale_values(groups.scales)
    if groups.factor is not None:
        scales = scales / groups.factor if groups.divides else scales * groups.factor
    zeros = None if groups.zeros is None else groups.spread(groups.zeros)
    return numbers_of(groups.codes, numbers, zeros) * groups.spread(scales)


def scale_values(scales: Tensor) -> Tensor:
    """Bytes are powers of two, less 127."""
    if scales.dtype == torch.uint8:
        exponents = scales.int()
        return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
    return scales.float()


def pack(codes: Tensor, numbers: Numbers) -> Tensor:
    """[rows, columns] codes as bytes [rows, blocks * 16], filled up with zeros to whole blocks."""
    quarters = F.pad(codes, (0, -codes.shape[-1] % BLOCK)).unflatten(-1, (-1, 4, EIGHTH)).int()
    packed = torch.zeros_like(quarters[..., 0, :])
    for quarter, moves in zip(quarters.unbind(-2), PLACES[numbers], strict=True):
        for bits, up in moves:
            packed |= (quarter & bits) << up
    return torch.stack((packed & 255, packed >> 8), -1).to(torch.uint8).flatten(-3)


def unpack(values: Tensor, columns: int, numbers: Numbers) -> Tensor:
    low_bytes, high_bytes = values.unflatten(-1, (-1, EIGHTH, 2)).int().unbind(-1)
    packed = low_bytes | high_bytes << 8
    quarters = [sum((packed >> up) & bits for bits, up in moves) for moves in PLACES[numbers]]
    return torch.stack(quarters, -2).flatten(-3)[..., :columns].to(torch.uint8)


def by_steps(of_groups: Tensor, each: int) -> Tensor:
    """[rows, groups] as [steps, rows, each]: of every row, what is in a step. Filled up with zeros."""
    wide = of_groups.view(torch.uint8) if of_groups.element_size() == 1 else of_groups
    steps = F.pad(wide, (0, -wide.shape[-1] % each)).unflatten(-1, (-1, each)).transpose(-2, -3)
    return steps.contiguous().view(of_groups.dtype)


def by_rows(of_steps: Tensor, groups: int) -> Tensor:
    return of_steps.transpose(-2, -3).flatten(-2)[..., :groups]


@dataclass(frozen=True)
class FourBitWeight:
    """A matrix [outputs, inputs], or a stack of them: `values` as `pack` makes them, scales by steps.

    Scales are bytes (powers of two), e4m3 with a `factor` for each row, or plain numbers. Whole numbers may have zero
    points, a byte each.
    """

    numbers: Numbers
    columns: int
    group: int
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factors: Tensor | None = None

    @classmethod
    def empty(
        cls,
        *shape: int,
        numbers: Numbers,
        group: int | None,
        scale_dtype: torch.dtype,
        zeros: bool,
        factors: bool,
        device: torch.device,
    ) -> FourBitWeight:
        *stack, rows, columns = shape
        width = group or max(BLOCK, -(-columns // BLOCK) * BLOCK)
        each = groups_of_step(width, columns)
        steps = -(-columns // (width * each))

        def memory(dtype: torch.dtype, *last: int) -> Tensor:
            return torch.empty(*stack, *last, dtype=dtype, device=device)

        return cls(
            numbers,
            columns,
            width,
            memory(torch.uint8, rows, -(-columns // BLOCK) * HALF),
            memory(scale_dtype, steps, rows, each),
            memory(torch.uint8, steps, rows, each) if zeros else None,
            memory(torch.float32, rows) if factors else None,
        )

    @classmethod
    def of(cls, matrix: Tensor) -> FourBitWeight:
        """The whole numbers nearest to one that is in plain numbers, by groups of 128 with zero points."""
        found = cls.empty(
            *matrix.shape,
            numbers="int4",
            group=ROUNDED_GROUP,
            scale_dtype=torch.float16,
            zeros=True,
            factors=False,
            device=matrix.device,
        )
        pieces = matrix.split(ROWS_AT_ONCE)
        for part, rows in zip(found.split([len(rows) for rows in pieces]), pieces, strict=True):
            part.fill(round_int4(rows, ROUNDED_GROUP, True, torch.float16))
        return found

    @property
    def _held(self) -> list[Tensor]:
        return [part for part in (self.values, self.scales, self.zeros, self.factors) if part is not None]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:-1], self.columns))

    @property
    def groups(self) -> int:
        """Of each row."""
        return -(-self.columns // self.group)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._held)

    def numel(self) -> int:
        return self.shape.numel()

    def _each(self, values: Tensor, scales: Tensor, zeros: Tensor | None, factors: Tensor | None) -> FourBitWeight:
        return FourBitWeight(self.numbers, self.columns, self.group, values, scales, zeros, factors)

    def __getitem__(self, index: int) -> FourBitWeight:
        zeros, factors = (part if part is None else part[index] for part in (self.zeros, self.factors))
        return self._each(self.values[index], self.scales[index], zeros, factors)

    def split(self, rows: list[int]) -> list[FourBitWeight]:
        """The matrices that were stacked, as views."""
        none = [None] * len(rows)
        zeros = none if self.zeros is None else self.zeros.split(rows, -2)
        factors = none if self.factors is None else self.factors.split(rows)
        parts = zip(self.values.split(rows), self.scales.split(rows, -2), zeros, factors, strict=True)
        return [self._each(*part) for part in parts]

    def fill(self, groups: Groups) -> None:
        """Take over a matrix of this shape, from whole groups."""
        assert groups.cut == 0
        self.values.copy_(pack(groups.codes, self.numbers))
        scales = by_steps(groups.scales, self.scales.shape[-1])
        if self.scales.element_size() == 1:
            self.scales.view(torch.uint8).copy_(scales.view(torch.uint8))
        else:
            self.scales.copy_(scales)
        if self.zeros is not None:
            assert groups.zeros is not None
            self.zeros.copy_(by_steps(groups.zeros, self.zeros.shape[-1]))
        if self.factors is not None:
            assert groups.factor is not None
            self.factors.copy_((1 / groups.factor if groups.divides else groups.factor).expand(self.factors.shape))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """What it stands for: the definition of all products with it."""
        codes = unpack(self.values, self.columns, self.numbers)
        scales = scale_values(by_rows(self.scales, self.groups))
        if self.factors is not None:
            scales = scales * self.factors[..., None]
        zeros = None if self.zeros is None else by_rows(self.zeros, self.groups)
        spread = [
            part if part is None else part.repeat_interleave(self.group, -1)[..., : self.columns]
            for part in (scales, zeros)
        ]
        assert spread[0] is not None
        return (numbers_of(codes, self.numbers, spread[1]) * spread[0]).to(dtype)

    def panels(self) -> Panels:
        """Whole numbers alone; where they have zero points, zero less the point is the group's minimum."""
        assert self.numbers == "int4"
        codes, scales = unpack(self.values, self.columns, self.numbers), by_rows(self.scales, self.groups)
        if self.zeros is None:
            return Panels.of(codes, scales, self.group, 4, MIDDLE)
        zeros = by_rows(self.zeros, self.groups)
        return Panels.of(codes, scales.float(), self.group, 4, 0, -(zeros.float() * scales.float()))


def groups_of_step(width: int, columns: int) -> int:
    """Groups whose scales lie together: those of a step; all, where steps would not be of whole groups."""
    if width % STEP == 0:
        return 1
    return STEP // width if STEP % width == 0 else -(-columns // width)


def round_int4(values: Tensor, group: int | None, asymmetric: bool, dtype: torch.dtype) -> Groups:
    """Whole numbers nearest to a matrix' own: each group by its largest, or between its least and its largest."""
    columns = values.shape[1]
    width = group or columns
    grouped = _in_groups(values, width)
    if not asymmetric:
        scales = (grouped.abs().amax(-1) / 7).clamp_min(_LEAST_SCALE).to(dtype)
        codes = torch.round(grouped / scales.float()[..., None]).clamp(-8, 7) + MIDDLE
        return Groups(_flat(codes, columns), scales, width)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp_min(_LEAST_SCALE).to(dtype)
    zeros = torch.round(-low / scales.float()).clamp(0, 15)
    codes = (torch.round(grouped / scales.float()[..., None]) + zeros[..., None]).clamp(0, 15)
    return Groups(_flat(codes, columns), scales, width, zeros.to(torch.uint8))


def round_mxfp4(values: Tensor) -> Groups:
    """The nearest e2m1 numbers, each 32 of them with the least power of two that lets their largest be."""
    grouped = _in_groups(values, BLOCK)
    largest = grouped.abs().amax(-1).clamp_min(2.0**-120)
    exponents = torch.ceil(torch.log2(largest / E2M1[-1])).clamp(-127, 127)
    codes = _nearest(grouped / torch.exp2(exponents)[..., None])
    return Groups(_flat(codes, values.shape[1]), (exponents + 127).to(torch.uint8), BLOCK)


def round_nvfp4(values: Tensor) -> Groups:
    """The nearest e2m1 numbers, each 16 of them with an e4m3 scale, and a factor that brings the largest to 448."""
    grouped = _in_groups(values, HALF)
    factor = (values.float().abs().amax() / (E2M1[-1] * 448)).clamp_min(2.0**-100)
    scales = (grouped.abs().amax(-1) / (E2M1[-1] * factor)).clamp_min(2.0**-9).to(torch.float8_e4m3fn)
    codes = _nearest(grouped / (scales.float() * factor)[..., None])
    return Groups(_flat(codes, values.shape[1]), scales, HALF, factor=factor.reshape(1))


_LEAST_SCALE = 2.0**-20


def _in_groups(values: Tensor, width: int) -> Tensor:
    return F.pad(values.float(), (0, -values.shape[1] % width)).unflatten(1, (-1, width))


def _flat(codes: Tensor, columns: int) -> Tensor:
    return codes.flatten(1)[:, :columns].to(torch.uint8)


def _nearest(values: Tensor) -> Tensor:
    """Codes of the e2m1 numbers next to these; of two as near, the even one."""
    borders = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)], device=values.device)
    size = values.abs()
    up, down = torch.bucketize(size, borders, right=True), torch.bucketize(size, borders)
    code = torch.where(up % 2 == 0, up, down)
    return code + 8 * (values < 0)
