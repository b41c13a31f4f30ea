"""How checkpoints keep quantised matrices: in which tensors, and what an element of each stands for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from phalanx.spec.formats import FORMATS, NumberFormat

Kind = Literal["fp8", "awq", "gptq", "int4", "mxfp4", "nvfp4", "gguf"]
Role = Literal["values", "scales", "zeros", "factor", "order"]
Part = tuple[slice, ...]

WORD = 8
"""Numbers of four bits in a word of 32."""
MX_BLOCK = 32

_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Piece:
    """One of the tensors of a matrix. An element of it stands for `tall` rows and `wide` columns, None being all.

    `ending` takes the place of `weight` at the end of the matrix' name, or follows the name where it begins with `_`.
    `transposed`: columns lie along the first axis. `vector`: only columns are there. `trailing` axes are inside an
    element.
    """

    role: Role
    ending: str
    tall: int | None
    wide: int | None
    dtypes: tuple[str, ...]
    transposed: bool = False
    vector: bool = False
    trailing: tuple[int, ...] = ()
    optional: bool = False

    def name(self, matrix: str) -> str:
        replaced = not self.ending.startswith("_") and self.ending
        return matrix.removesuffix("weight") + self.ending if replaced else matrix + self.ending

    def shape(self, matrix: tuple[int, ...]) -> tuple[int, ...]:
        """Of the whole matrix' piece, rows first."""
        return tuple(
            1 if unit is None else -(-size // unit) for size, unit in zip(matrix, (self.tall, self.wide), strict=True)
        )

    def stored_shape(self, matrix: tuple[int, ...]) -> tuple[int, ...]:
        """As the file has it."""
        rows, columns = self.shape(matrix)
        if self.vector:
            return (columns,)
        return (*((columns, rows) if self.transposed else (rows, columns)), *self.trailing)

    def part(self, matrix: Part) -> Part:
        """The elements that a part of the matrix touches."""
        return tuple(
            slice(0, 1) if unit is None else slice(part.start // unit, -(-part.stop // unit))
            for part, unit in zip(matrix, (self.tall, self.wide), strict=True)
        )


@dataclass(frozen=True)
class Scheme:
    """A way to keep a matrix. `kind` names the file of `phalanx.quant` that knows its arithmetic.

    `ignored` are endings of tensors that may be there and say nothing new. `zero_shift` is added to zero points.
    `divides`: a matrix' own factor divides its scales.
    """

    kind: Kind
    format: NumberFormat
    pieces: tuple[Piece, ...]
    ignored: tuple[str, ...] = ()
    zero_shift: int = 0
    divides: bool = False
    scale_dtype: str = "fp32"

    def piece(self, role: Role) -> Piece | None:
        return next((piece for piece in self.pieces if piece.role == role), None)

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None: a whole row."""
        return self.format.tile[1] if self.format.tile else None

    @property
    def rounds(self) -> bool:
        """Whether matrices that a checkpoint keeps wider may be brought to this format as they are loaded."""
        return self.kind == "fp8"


def _tiled(name: str, group: int | None) -> NumberFormat:
    known = FORMATS[name]
    return known if known.tile == (1, group) else dataclasses.replace(known, tile=(1, group))


def fp8(number_format: NumberFormat, scales: str = "_scale_inv", per_tensor: bool = False) -> Scheme:
    """e4m3 values with a scale for each tile, for each row, or one for all."""
    tall, wide = (None, None) if per_tensor else number_format.tile or (1, None)
    return Scheme(
        "fp8",
        number_format,
        (
            Piece("values", "", 1, 1, ("F8_E4M3",)),
            Piece("scales", scales, tall, wide, (*_FLOATS, "F8_E8M0")),
        ),
    )


def awq(group: int | None) -> Scheme:
    """AutoAWQ's gemm: by columns, eight outputs to a word in an order of their own."""
    return Scheme(
        "awq",
        _tiled("awq", group),
        (
            Piece("values", "qweight", WORD, 1, ("I32",), transposed=True),
            Piece("scales", "scales", 1, group, ("F16", "BF16"), transposed=True),
            Piece("zeros", "qzeros", WORD, group, ("I32",), transposed=True),
        ),
        scale_dtype="fp16",
    )


def gptq(group: int | None, zero_shift: int) -> Scheme:
    """GPTQ without reordered inputs: eight inputs to a word."""
    return Scheme(
        "gptq",
        _tiled("gptq", group),
        (
            Piece("values", "qweight", 1, WORD, ("I32",), transposed=True),
            Piece("scales", "scales", 1, group, _FLOATS, transposed=True),
            Piece("zeros", "qzeros", WORD, group, ("I32",), transposed=True),
            Piece("order", "g_idx", None, 1, ("I32", "I64"), vector=True, optional=True),
        ),
        zero_shift=zero_shift,
        scale_dtype="fp16",
    )


def packed_int4(group: int | None, symmetric: bool, scale_dtype: str) -> Scheme:
    """compressed-tensors' pack-quantized: eight inputs to a word, zero at 8."""
    zeros = (Piece("zeros", "_zero_point", WORD, group, ("I32",)),)
    return Scheme(
        "int4",
        _tiled("int4", group),
        (
            Piece("values", "_packed", 1, WORD, ("I32",)),
            Piece("scales", "_scale", 1, group, _FLOATS),
            *(() if symmetric else zeros),
        ),
        ignored=("_shape",),
        scale_dtype=scale_dtype,
    )


def mxfp4(values: str = "_blocks", scales: str = "_scales", in_blocks: bool = True) -> Scheme:
    """Two e2m1 numbers to a byte, the low half first, and a power of two for each 32 of them."""
    half = MX_BLOCK // 2
    return Scheme(
        "mxfp4",
        FORMATS["mxfp4"],
        (
            Piece("values", values, 1, MX_BLOCK, ("U8",), trailing=(half,))
            if in_blocks
            else Piece("values", values, 1, 2, ("U8", "I8")),
            Piece("scales", scales, 1, MX_BLOCK, ("U8", "F8_E8M0")),
        ),
    )


def compressed_mxfp4() -> Scheme:
    return mxfp4("_packed", "_scale", in_blocks=False)


GGUF_BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34}
"""Of 32 numbers, for the kinds that are held as they are stored."""


def gguf(kind: str) -> Scheme:
    """Blocks of 32 numbers with their scales, and minimums in kinds that end in 1."""
    size = GGUF_BLOCK_BYTES[kind]
    number_format = NumberFormat(kind, int(kind[1]), (1, 32), size - 4 * int(kind[1]))
    return Scheme("gguf", number_format, (Piece("values", "", 1, 32, ("U8",), trailing=(size,)),))


def nvfp4(values: str, factor: str, divides: bool) -> Scheme:
    """Two e2m1 numbers to a byte, an e4m3 scale for each 16 of them, and a factor for the whole matrix."""
    return Scheme(
        "nvfp4",
        FORMATS["nvfp4"],
        (
            Piece("values", values, 1, 2, ("U8",)),
            Piece("scales", "_scale", 1, 16, ("F8_E4M3",)),
            Piece("factor", factor, None, None, ("F32",)),
        ),
        divides=divides,
    )


DEFAULTS: dict[str, Scheme] = {
    "fp8": fp8(FORMATS["fp8"]),
    "fp8-channel": fp8(FORMATS["fp8-channel"], "_scale"),
    "int4": packed_int4(128, True, "bf16"),
    "awq": awq(128),
    "gptq": gptq(128, 1),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4("_packed", "_global_scale", True),
}
"""How each quantised format is usually kept."""


@dataclass(frozen=True)
class Quantization:
    """How a model's linear layers are kept, but for the modules it names as skipped: those stay bf16.

    Where experts are kept in one way and all else in another, `others` is the latter. With `targets` only modules that
    these name are quantised.
    """

    scheme: Scheme
    skipped: tuple[str, ...] = ()
    others: Scheme | None = None
    targets: tuple[str, ...] = ()

    @classmethod
    def usual(cls, number_format: str) -> Quantization:
        return cls(DEFAULTS[number_format])

    @property
    def format(self) -> NumberFormat:
        return self.scheme.format

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return (self.scheme,) if self.others is None else (self.scheme, self.others)

    def scheme_for(self, expert: bool) -> Scheme:
        return self.scheme if expert or self.others is None else self.others

    def skips(self, names: Sequence[str]) -> bool:
        """Whether a tensor, by any of its names, is left as it is. Checkpoints name modules by path, by a part of the
        path, with `*`, or as `re:` and a pattern.
        """
        targeted = not self.targets or any(map(self._targeted.name, names))
        return not targeted or any(map(self._skipped.name, names))

    @cached_property
    def _targeted(self) -> _Modules:
        return _Modules(self.targets)

    @cached_property
    def _skipped(self) -> _Modules:
        return _Modules(self.skipped)


class _Modules:
    """Modules that a configuration tells of, for looking up many tensors among hundreds of them."""

    def __init__(self, told: tuple[str, ...]) -> None:
        spelt = [module for module in told if not module.startswith("re:")]
        self._patterns = [re.compile(module[3:]) for module in told if module.startswith("re:")]
        self._starred = [module for module in spelt if "*" in module]
        self._paths = {module for module in spelt if "*" not in module}
        self._lengths = {module.count(".") + 1 for module in self._paths}
        self._ends = {module.rpartition(".")[2] for module in self._paths}

    def name(self, tensor: str) -> bool:
        path = tensor.removesuffix(".weight")
        return (
            self._name_a_part(tensor.split("."))
            or any(pattern.match(path) for pattern in self._patterns)
            or any(fnmatchcase(f"{tensor}.", f"{module}.*") or fnmatchcase(tensor, module) for module in self._starred)
        )

    def _name_a_part(self, parts: list[str]) -> bool:
        if self._ends.isdisjoint(parts):
            return False
        within = (".".join(parts[at : at + many]) for many in self._lengths for at in range(len(parts) - many + 1))
        return any(part in self._paths for part in within)
