"""Weights of 4, 5 and 8 bits as a CPU multiplies them: panels of 16 outputs, blocks of 32 columns (see panels.c)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import cpu

PANEL, BLOCK, WORD = 16, 32, 4
_FEW = 16
"""Rows up to which e4m3 weights are widened in registers."""
_TILE = 256
_NO_NUMBER = 0x7F
"""In e4m3, whatever its sign."""
_SCALE_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Record(ctypes.Structure):
    """`struct matrix` of panels.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "minimums")),
        *((name, ctypes.c_longlong) for name in ("rows", "columns", "group", "bits", "scale_kind", "shift", "units")),
        *((name, ctypes.c_longlong) for name in ("codes_apart", "scales_apart")),
    )


@dataclass(frozen=True)
class Panels:
    """A matrix [rows, columns] whose weights are (code - shift) * scale + minimum.

    `codes` are [panels, blocks, bytes of a block], scales and minimums [panels, groups, 16]; a group has `group`
    columns. Codes that are e4m3 numbers lie column by column, [panels, columns, 16]. With `units`, a power of two up to
    8 that whole numbers may have, products are summed over as many equal parts of the columns, and these as a tree.
    """

    rows: int
    columns: int
    group: int
    bits: int
    shift: int
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    e4m3: bool = False
    units: int = 1

    def __post_init__(self) -> None:
        together = BLOCK if self.group >= self.columns else self.group
        assert self.units == 1 or (self.columns % (self.units * together) == 0 and not self.e4m3)

    @classmethod
    def of(
        cls, codes: Tensor, scales: Tensor, group: int, bits: int, shift: int = 0, minimums: Tensor | None = None
    ) -> Panels:
        """From codes [rows, columns], one a byte, and what each group of a row has."""
        rows, columns = codes.shape
        spread = (_by_panels(part) if part is not None else None for part in (scales, minimums))
        packed = _pack(codes.view(torch.uint8), bits)
        own_scales, own_minimums = spread
        assert own_scales is not None
        return cls(rows, columns, group, bits, shift, packed, own_scales, own_minimums)

    @classmethod
    def of_e4m3(cls, values: Tensor, scales: Tensor, group: int) -> Panels:
        """From e4m3 numbers [rows, columns] and the scales of each group of a row."""
        rows, columns = values.shape
        return cls(rows, columns, group, 8, 0, _by_panels(values.view(torch.uint8)), _by_panels(scales), e4m3=True)

    @cached_property
    def _record(self) -> _Record:
        minimums, kind = self.minimums, _SCALE_KINDS[self.scales.dtype]
        addresses = (self.codes.data_ptr(), self.scales.data_ptr(), None if minimums is None else minimums.data_ptr())
        apart = (self.codes.stride(0) * self.codes.element_size(), self.scales.stride(0) * self.scales.element_size())
        return _Record(*addresses, self.rows, self.columns, self.group, self.bits, kind, self.shift, self.units, *apart)

    @cached_property
    def address(self) -> int:
        """Of what the C kernel wants to know."""
        return ctypes.addressof(self._record)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows, self.columns))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.minimums) if part is not None)

    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def is_finite(self) -> bool:
        """If not it must not be multiplied: kernels widen numbers by moving bits, and make large ones of those that are
        none.
        """
        factors = [part for part in (self.scales, self.minimums) if part is not None]
        return all(bool(part.isfinite().all()) for part in factors) and not (
            self.e4m3 and bool((self.codes & _NO_NUMBER == _NO_NUMBER).any())
        )

    @cached_property
    def leaves(self) -> list[Panels]:
        """The columns of each unit, as views."""
        width = self.columns // self.units
        return [self._columns(start, start + width) for start in range(0, self.units * width, width)]

    def _columns(self, start: int, stop: int) -> Panels:
        codes = self.codes[:, start // BLOCK : -(-stop // BLOCK)]
        groups = slice(start // self.group, -(-stop // self.group))
        minimums = None if self.minimums is None else self.minimums[:, groups]
        return replace(
            self, columns=stop - start, codes=codes, scales=self.scales[:, groups], minimums=minimums, units=1
        )

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """What it stands for: the definition of all products with it."""
        return self.look_up(torch.arange(self.rows)).to(dtype)

    def look_up(self, rows: Tensor) -> Tensor:
        """Some rows, in float32."""
        panel, lane = rows // PANEL, rows % PANEL
        if self.e4m3:
            numbers = self.codes[panel, :, lane].view(torch.float8_e4m3fn).float()
        else:
            codes = _unpack(self.codes[panel], self.bits)[torch.arange(len(rows)), :, :, lane].flatten(1)
            numbers = codes[:, : self.columns].float() - self.shift
        wide = numbers * self._spread(self.scales[panel, :, lane])
        return wide if self.minimums is None else wide + self._spread(self.minimums[panel, :, lane])

    def _spread(self, of_groups: Tensor) -> Tensor:
        return of_groups.float().repeat_interleave(self.group, 1)[:, : self.columns]


def product(x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias. For whole numbers x is in 16 bits by blocks of 32 columns, for e4m3 as it is."""
    rows = x.shape[0]
    if weight.e4m3 and rows > _FEW:
        return _product_by_tiles(x, weight, bias)
    y = x.new_empty(rows, weight.rows)
    if rows and weight.rows:
        cpu.call("e4m3_product" if weight.e4m3 else "panel_product", weight.address, x.contiguous(), bias, y, rows)
    return y


def unit_sums(x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
    """What the tree of a product is made of, [units, rows, outputs]. The first unit has the bias."""
    inputs = x.chunk(weight.units, 1)
    cut = enumerate(zip(inputs, weight.leaves, strict=True))
    return torch.stack([product(own, leaf, None if unit else bias) for unit, (own, leaf) in cut])


def _product_by_tiles(x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
    """Many rows with e4m3 weights: some outputs after the other widened, and multiplied by the library."""
    y = x.new_empty(x.shape[0], weight.rows)
    for start in range(0, weight.rows, _TILE):
        stop = min(start + _TILE, weight.rows)
        wide = x.new_empty(stop - start, weight.columns)
        cpu.call("widen_e4m3", weight.address, wide, start, stop)
        torch.mm(x, wide.t(), out=y[:, start:stop])
    return y if bias is None else y.add_(bias)


def product_torch(x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
    """The definition, but for the rounding of x."""
    return F.linear(x, weight.dequantised(x.dtype), bias)


def _by_panels(of_rows: Tensor) -> Tensor:
    """[rows, groups] as [panels, groups, 16], filled up with zeros."""
    padded = F.pad(of_rows, (0, 0, 0, -len(of_rows) % PANEL))
    return padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def _pack(codes: Tensor, bits: int) -> Tensor:
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % BLOCK, 0, -rows % PANEL))
    words = padded.view(-(-rows // PANEL), PANEL, -(-columns // BLOCK), BLOCK // WORD, WORD)
    words = words.permute(0, 2, 3, 1, 4).contiguous().flatten(3)
    if bits == 8:
        return words.flatten(2)
    low, high = words[:, :, :4], words[:, :, 4:]
    packed = ((low & 15) | (high << 4)).flatten(2)
    if bits == 4:
        return packed
    fifth = sum((words[:, :, word] >> 4) << word for word in range(BLOCK // WORD))
    assert isinstance(fifth, Tensor)
    return torch.cat((packed, fifth), 2)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """[panels, blocks, words, 16, 4] codes."""
    step = PANEL * WORD
    if bits == 8:
        return packed.view(torch.int8).unflatten(2, (BLOCK // WORD, PANEL, WORD))
    both = packed[:, :, : 4 * step].unflatten(2, (4, PANEL, WORD))
    codes = torch.cat((both & 15, both >> 4), 2)
    if bits == 5:
        fifth = packed[:, :, None, 4 * step :].unflatten(3, (PANEL, WORD))
        places = torch.arange(BLOCK // WORD, dtype=torch.uint8).view(-1, 1, 1)
        codes |= ((fifth >> places) & 1) << 4
    return codes
