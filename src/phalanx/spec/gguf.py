"""The header of a GGUF file: its fields, and where its tensors lie."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from phalanx.errors import CheckpointError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: shape with the slowest dimension first, as torch counts."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    @property
    def row_bytes(self) -> int:
        per_block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // per_block * block_bytes

    @property
    def bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """The header of a GGUF file, which every rank reads. The package's own reader takes seconds over a vocabulary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():
                raise ValueError("no regular file")
            with path.open("rb") as file:
                self._read_header(file)
        except (OSError, struct.error, KeyError, ValueError, TypeError, MemoryError, OverflowError) as error:
            cause = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointError(
                "broken_file", f"{path} is no readable GGUF file: {cause}.", "Download it again."
            ) from None

    def _read_header(self, file: Any) -> None:
        magic, version = struct.unpack("<4sI", file.read(8))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        tensors, pairs = struct.unpack("<QQ", file.read(16))
        self.fields: dict[str, Any] = {}
        for _ in range(pairs):
            key = _read_string(file)
            self.fields[key] = _read_value(file, _read_scalar(file, "<I"))
        self.tensors: dict[str, StoredTensor] = {}
        for _ in range(tensors):
            name, rank = _read_string(file), _read_scalar(file, "<I")
            if not 1 <= rank <= _MOST_DIMENSIONS:
                raise ValueError(f"{name} has {rank} dimensions")
            shape = struct.unpack(f"<{rank}Q", file.read(8 * rank))
            kind, offset = struct.unpack("<IQ", file.read(12))
            self.tensors[name] = stored = StoredTensor(tuple(reversed(shape)), GGMLQuantizationType(kind), offset)
            if shape[0] % GGML_QUANT_SIZES[stored.kind][0]:
                raise ValueError(
                    f"{name} has rows of {shape[0]} numbers, which are no whole blocks of {stored.kind.name}"
                )
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        if not isinstance(self.fields.get("general.architecture"), str):
            raise ValueError("it does not say of which architecture it is")
        self.data_start = -(-file.tell() // alignment) * alignment
        needed, size = (stored.offset + stored.bytes for stored in self.tensors.values()), self.path.stat().st_size
        if self.data_start + max(needed, default=-self.data_start) > size:
            raise ValueError(f"its tensors reach beyond its {size} bytes")

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the file's own architecture, such as `block_count`."""
        return self.fields.get(f"{self.fields['general.architecture']}.{key}", default)


def _take(file: Any, count: int) -> bytes:
    """Of a file that may claim anything: memory is only asked for as much as there is to read."""
    if count > os.fstat(file.fileno()).st_size:
        raise ValueError(f"it claims a value of {count} bytes")
    found = file.read(count)
    if len(found) < count:
        raise ValueError(f"it ends within a value of {count} bytes")
    return found


def _read_scalar(file: Any, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _read_string(file: Any) -> str:
    return _take(file, _read_scalar(file, "<Q")).decode("utf-8")


def _read_value(file: Any, kind: int) -> Any:
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        return _read_scalar(file, _SCALARS[kind])
    item, count = struct.unpack("<IQ", file.read(12))
    if item == _ARRAY:
        raise ValueError("it has arrays of arrays")
    if item == _STRING:
        return [_read_string(file) for _ in range(count)]
    layout = f"<{count}{_SCALARS[item][1]}"
    return list(struct.unpack(layout, _take(file, struct.calcsize(layout))))
