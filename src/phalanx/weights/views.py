"""A checkpoint's tensors under the names and in the shapes of the model's own, however the checkpoint keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.spec import ModelSpec
from phalanx.spec.tensors import Run, Spelling, Stored
from phalanx.spec.tensors import Tensor as TensorSpec
from phalanx.weights.reader import Reader, Slices

_FOR_ACTIVATIONS = re.compile(r".*\.(k_scale|v_scale|q_scale|input_scale|output_scale|activation_scale)")


BLOCKS, SCALES = "_blocks", "_scales"
MXFP4_BLOCK = 32
_HALF_BYTES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def widen_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """[rows, blocks, 16] bytes of two numbers each, the low half first, and a power of two for each block of 32."""
    numbers = torch.tensor([*_HALF_BYTES, *(-number for number in _HALF_BYTES)])
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return torch.ldexp(numbers[halves], scales.int()[..., None] - 127).flatten(-2)


class _Place(NamedTuple):
    """A tensor of the file, and how ours lies in it; `unit` is how many of our rows one of its rows stands for."""

    name: str
    stored: Stored
    unit: int


class ViewReader:
    """Hands out a model's tensors from a reader of files that may hold them fused, stacked, transposed or renamed."""

    def __init__(self, files: Reader, spec: ModelSpec) -> None:
        self._files = files
        self._spec = spec
        self._scales = spec.quantization.scales if spec.quantization else "_scale_inv"

    def names(self) -> list[str]:
        return self._files.names()

    def shape(self, name: str) -> tuple[int, ...] | None:
        place = self._find(name)
        shape = self._files.shape(place.name) if place else None
        if place is None or shape is None:
            return None
        stored = place.stored
        if stored.is_plain:
            return shape
        if stored.mxfp4:
            shape = (*shape[:-2], shape[-2] * MXFP4_BLOCK)
        rest = shape[1:] if stored.stacked else shape
        rows, *others = (rest[1], rest[0]) if stored.transposed else rest
        run = _in_units(stored.run, place)
        if run is None or rows % run.stride:
            return (rows, *others)
        return (rows // run.stride * run.width, *others)

    def is_fp8(self, name: str) -> bool:
        place = self._find(name)
        return place is not None and self._files.is_fp8(place.name)

    def read(self, name: str, slices: Slices) -> Tensor:
        place = self._find(name)
        assert place is not None, name
        if place.stored.is_plain:
            return self._files.read(place.name, slices)
        stored, (rows, *rest) = place.stored, slices
        span, chosen = _spread(rows, _in_units(stored.run, place))
        if stored.mxfp4:
            values = self._read_mxfp4(place, span, rest[0])
            return values if chosen is None else values[chosen]
        wanted = (*rest, span) if stored.transposed else (span, *rest)
        if stored.stacked:
            assert stored.expert is not None
            wanted = (slice(stored.expert, stored.expert + 1), *wanted)
        values = self._files.read(place.name, wanted)
        values = values[0] if stored.stacked else values
        values = values.transpose(0, 1) if stored.transposed else values
        values = values if chosen is None else values[chosen]
        return values.float() + stored.plus if stored.plus else values

    def _read_mxfp4(self, place: _Place, rows: slice, columns: slice) -> Tensor:
        """Rows of one expert, in float32."""
        stored, name = place.stored, place.name.removesuffix(BLOCKS)
        assert stored.expert is not None
        one = slice(stored.expert, stored.expert + 1)
        blocks = slice(columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK))
        packed = self._files.read(name + BLOCKS, (one, rows, blocks, slice(0, MXFP4_BLOCK // 2)))[0]
        scales = self._files.read(name + SCALES, (one, rows, blocks))[0]
        first = blocks.start * MXFP4_BLOCK
        return widen_mxfp4(packed, scales)[:, columns.start - first : columns.stop - first]

    def close(self) -> None:
        self._files.close()

    def _find(self, name: str) -> _Place | None:
        tensor, suffix, unit = self._spec.tensors.get(name), "", 1
        if tensor is None and name.endswith(self._scales):
            suffix, unit = self._scales, self._spec.quantization.block if self._spec.quantization else 1
            tensor = self._spec.tensors.get(name.removesuffix(suffix))
        if tensor is None:
            return _Place(name, Stored(name), 1) if self._files.shape(name) is not None else None
        for found, stored in self._candidates(tensor):
            ending = BLOCKS if stored.mxfp4 else suffix
            if self._files.shape(found + ending) is not None:
                return _Place(found + ending, stored, unit)
        return None

    def _candidates(self, tensor: TensorSpec) -> Iterator[tuple[str, Stored]]:
        for stored in tensor.sources or (Stored(tensor.name),):
            yield from ((name, stored) for name in self._spec.names(stored.name))
            for spelling in self._spec.spellings:
                yield _spelt(stored.name, spelling), stored

    def unknown(self) -> list[str]:
        """Tensors of the files that belong to nothing in the model and are not among those it leaves alone."""
        known: set[str] = set()
        for tensor in self._spec.tensors.values():
            for name, _ in self._candidates(tensor):
                known |= {name, name + self._scales, name + BLOCKS, name + SCALES}
        if self._spec.tied_embeddings:
            known |= {"lm_head.weight", *(f"{theirs}lm_head.weight" for _, theirs in self._spec.prefixes)}
        ignored = [re.compile(pattern) for pattern in self._spec.ignored]
        return [
            name
            for name in self._files.names()
            if name not in known
            and not _FOR_ACTIVATIONS.fullmatch(name)
            and not any(pattern.fullmatch(name) for pattern in ignored)
        ]


def _spelt(name: str, spelling: Spelling) -> str:
    for ours, theirs in spelling:
        name = name.replace(ours, theirs)
    return name


def _in_units(run: Run | None, place: _Place) -> Run | None:
    """Where scales stand for several rows each, the run in scales."""
    if run is None or place.unit == 1:
        return run
    if any(number % place.unit for number in run):
        raise CheckpointError(
            "cut_scales",
            f"{place.name} has a scale for every {place.unit} rows, which parts of {run.width} rows would cut.",
            "Use the bf16 version of this model.",
        )
    return Run(*(number // place.unit for number in run))


def _spread(rows: slice, run: Run | None) -> tuple[slice, Tensor | None]:
    """The rows of the file to read for some of ours, and which of those they are; None: all of them."""
    if run is None or rows.start == rows.stop:
        return rows, None
    first, last = rows.start // run.width, (rows.stop - 1) // run.width
    start = first * run.stride + run.offset + rows.start % run.width
    stop = last * run.stride + run.offset + (rows.stop - 1) % run.width + 1
    if first == last:
        return slice(start, stop), None
    ours = torch.arange(rows.start, rows.stop)
    return slice(start, stop), ours // run.width * run.stride + run.offset + ours % run.width - start
