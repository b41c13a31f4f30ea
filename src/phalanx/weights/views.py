"""A checkpoint's tensors under the names and in the shapes of the model's own, however the checkpoint keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.kernels.four_bit import reordered
from phalanx.spec import ModelSpec, Piece, Scheme
from phalanx.spec.schemes import Role
from phalanx.spec.tensors import Run, Spelling, Stored
from phalanx.spec.tensors import Tensor as TensorSpec
from phalanx.weights.reader import Pieces, SafetensorsReader, Slices

_FOR_ACTIVATIONS = re.compile(
    r".*\.(k_scale|v_scale|q_scale|input_scale|input_global_scale|output_scale|activation_scale)"
)
_NUMBERS = ("F32", "BF16", "F16", "F64", "F8_E4M3", "F8_E5M2")
_WHOLE_NUMBERS = ("I64", "I32", "I16", "U8")
"""Of tables."""
_WHOLE = Piece("values", "", 1, 1, ())
"""A matrix that is not quantised is its own only piece."""


class _Place(NamedTuple):
    """A tensor of the file, how ours lies in it, and which piece of ours it is."""

    name: str
    stored: Stored
    piece: Piece

    @property
    def run(self) -> Run | None:
        """In elements of the piece, of which each may stand for several rows."""
        run, unit = self.stored.run, self.piece.tall or 1
        if run is None or unit == 1:
            return run
        if any(number % unit for number in run):
            raise CheckpointError(
                "cut_scales",
                f"{self.name} has an element for every {unit} rows, which parts of {run.width} rows would cut.",
                "Use the bf16 version of this model.",
            )
        return Run(*(number // unit for number in run))

    @property
    def transposed(self) -> bool:
        return self.stored.transposed != self.piece.transposed


class ViewReader:
    """Hands out a model's tensors from a reader of files that may hold them fused, stacked, transposed or renamed."""

    def __init__(self, files: SafetensorsReader, spec: ModelSpec) -> None:
        self._files = files
        self._spec = spec
        self._places: dict[tuple[str, Piece], _Place | None] = {}

    def names(self) -> list[str]:
        return self._files.names()

    def shape(self, name: str) -> tuple[int, ...] | None:
        place = self._find(name)
        return None if place is None else self._shape(place)

    def _shape(self, place: _Place) -> tuple[int, ...]:
        """Rows first, and as many as are ours."""
        shape = self._files.shape(place.name)
        assert shape is not None
        if place.piece.tall is None or (place.stored.is_plain and not place.transposed):
            return shape
        rest = shape[1:] if place.stored.stacked else shape
        if not rest:
            return rest
        rows, *others = (rest[1], rest[0], *rest[2:]) if place.transposed and len(rest) > 1 else rest
        run = place.run
        if run is None or rows % run.stride:
            return (rows, *others)
        return (rows // run.stride * run.width, *others)

    def read(self, name: str, slices: Slices) -> Tensor:
        place = self._find(name)
        assert place is not None, name
        return self._read(place, slices)

    def _read(self, place: _Place, slices: Slices) -> Tensor:
        stored = place.stored
        if stored.is_plain and not place.transposed:
            return self._files.read(place.name, slices)
        rows, *rest = slices
        span, chosen = _spread(rows, place.run)
        wanted = (rest[0], span, *rest[1:]) if place.transposed else (span, *rest)
        if stored.stacked:
            assert stored.expert is not None
            wanted = (slice(stored.expert, stored.expert + 1), *wanted)
        values = self._files.read(place.name, wanted)
        values = values[0] if stored.stacked else values
        values = values.transpose(0, 1) if place.transposed else values
        values = values if chosen is None else reordered(values, chosen)
        return values.float() + stored.plus if stored.plus else values

    def place(self, name: str) -> tuple[str, Stored]:
        """The tensor of the files that one of ours lies in, as plain numbers, and how."""
        place = self._find(name)
        assert place is not None, name
        return place.name, place.stored

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor of the files."""
        return self._files.shape(name) or ()

    def read_stored(self, name: str) -> Tensor:
        """A tensor of the files, whole and as it is there."""
        return self._files.read(name, tuple(slice(0, size) for size in self.stored_shape(name)))

    def scheme_of(self, name: str) -> Scheme | None:
        """As the configuration tells, where the file has such values."""
        tensor = self._spec.tensors.get(name)
        scheme = self._spec.scheme_of(tensor) if tensor else None
        if tensor is None or scheme is None:
            return None
        values = scheme.pieces[0]
        place = self._find_piece(tensor, values)
        if place is None or (not values.ending and self._files.dtype(place.name) not in values.dtypes):
            return None
        return scheme

    def read_pieces(self, name: str, slices: Slices, roles: Sequence[Role] = ()) -> Pieces:
        scheme, tensor = self.scheme_of(name), self._spec.tensors[name]
        assert scheme is not None, name
        pieces: Pieces = {}
        for piece in scheme.pieces:
            place = self._find_piece(tensor, piece)
            if place is not None and (not roles or piece.role in roles):
                pieces[piece.role] = self._read_piece(place, slices)
        return pieces

    def _read_piece(self, place: _Place, slices: Slices) -> Tensor:
        piece, shape = place.piece, self._shape(place)
        if piece.tall is None:
            return self._files.read(place.name, tuple(slice(0, size) for size in shape))
        inside = tuple(slice(0, size) for size in piece.trailing)
        return self._read(place, (*piece.part(slices), *inside))

    def check_plain(self, tensor: TensorSpec) -> None:
        """Refuse a tensor that is no plain numbers, or has the scales of a quantised one beside it."""
        place, scheme = self._find_piece(tensor, _WHOLE), self._spec.scheme_of(tensor)
        assert place is not None
        dtype = self._files.dtype(place.name)
        if dtype not in _NUMBERS and not (tensor.wide and dtype in _WHOLE_NUMBERS):
            raise CheckpointError(
                "wrong_dtype",
                f"{place.name} is stored as {dtype}, where numbers are {', '.join(_NUMBERS)}.",
                "Check that config.json tells of how these weights are quantised.",
            )
        for piece in scheme.pieces[1:] if scheme else ():
            beside = self._find_piece(tensor, piece)
            if scheme and beside is not None:
                raise CheckpointError(
                    "wrong_dtype",
                    f"{place.name} is stored as {dtype}, and yet {beside.name} is there, which belongs to "
                    f"{scheme.format.name} values in {' or '.join(scheme.pieces[0].dtypes)}.",
                    "Use a version of the model that was quantised otherwise, or one that is not.",
                )

    def check_stacks(self) -> None:
        """Refuse stacks of more or fewer experts than the model has, among the tensors that were looked for."""
        told: dict[str, int] = {}
        for place in self._places.values():
            if place is not None and place.stored.expert is not None:
                told[place.name] = max(told.get(place.name, 0), place.stored.expert + 1)
        for name, experts in told.items():
            shape = self._files.shape(name) or ()
            if shape[:1] != (experts,):
                raise CheckpointError(
                    "misshapen_tensor",
                    f"{name} has shape {list(shape)}, but the configuration tells of {experts} experts.",
                    "Check that config.json belongs to these weights.",
                )

    def check_pieces(self, tensor: TensorSpec) -> None:
        """Refuse a quantised matrix of which a piece is missing, misshapen or of a wrong kind."""
        scheme = self.scheme_of(tensor.name)
        for piece in scheme.pieces if scheme else ():
            name, place = piece.name(tensor.name), self._find_piece(tensor, piece)
            if place is None:
                if not piece.optional:
                    raise CheckpointError(
                        "missing_tensor",
                        f"The checkpoint lacks {name}, without which {tensor.name} means nothing.",
                        "Download the whole checkpoint, or check that config.json belongs to it.",
                    )
                continue
            self._check_piece(place, name, tensor, scheme)

    def _check_piece(self, place: _Place, name: str, tensor: TensorSpec, scheme: Scheme | None) -> None:
        assert scheme is not None
        piece, found, dtype = place.piece, self._shape(place), self._files.dtype(place.name)
        if dtype not in piece.dtypes:
            raise CheckpointError(
                "wrong_dtype",
                f"{name} is stored as {dtype}, where {scheme.format.name} has {' or '.join(piece.dtypes)}.",
                "Check that config.json belongs to these weights.",
            )
        wanted = piece.stored_shape(tensor.shape)
        meant = (wanted[1], wanted[0], *wanted[2:]) if piece.transposed else wanted
        single = piece.tall is None and not piece.vector
        if found != meant and not (single and set(found) <= {1}):
            seen = (found[1], found[0], *found[2:]) if piece.transposed and len(found) > 1 else found
            raise CheckpointError(
                "misshapen_tensor",
                f"{name} has shape {list(seen)}, but {list(tensor.shape)} in {_told(scheme)} makes it {list(wanted)}.",
                "Check that config.json belongs to these weights.",
            )

    def close(self) -> None:
        self._files.close()

    def _find(self, name: str) -> _Place | None:
        tensor = self._spec.tensors.get(name)
        if tensor is None:
            return _Place(name, Stored(name), _WHOLE) if self._files.shape(name) is not None else None
        return self._find_piece(tensor, _WHOLE)

    def _find_piece(self, tensor: TensorSpec, piece: Piece) -> _Place | None:
        key = tensor.name, piece
        if key not in self._places:
            self._places[key] = self._look_for(tensor, piece)
        return self._places[key]

    def _look_for(self, tensor: TensorSpec, piece: Piece) -> _Place | None:
        for found, stored in self._candidates(tensor, piece is not _WHOLE):
            name = piece.name(found)
            if self._files.shape(name) is not None:
                return _Place(name, stored, piece)
        return None

    def _candidates(self, tensor: TensorSpec, quantised: bool) -> Iterator[tuple[str, Stored]]:
        sources = tensor.sources or (Stored(tensor.name),)
        apart = any(stored.packed for stored in sources)
        for stored in sources:
            if (stored.transposed and apart) if quantised else stored.packed:
                continue
            yield from ((name, stored) for name in self._spec.names(stored.name))
            for spelling in self._spec.spellings:
                yield _spelt(stored.name, spelling), stored

    def unknown(self) -> list[str]:
        """Tensors of the files that belong to nothing in the model and are not among those it leaves alone."""
        known: set[str] = set()
        for tensor in self._spec.tensors.values():
            scheme = self._spec.scheme_of(tensor)
            known |= {name for name, _ in self._candidates(tensor, False)}
            for name, _ in self._candidates(tensor, True) if scheme else ():
                known |= {piece.name(name) for piece in scheme.pieces} if scheme else set()
                known |= {name + ending for ending in scheme.ignored} if scheme else set()
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


def rows_of(run: Run | None, rows: int) -> Tensor:
    """Where in a tensor of the files our rows lie."""
    span, chosen = _spread(slice(0, rows), run)
    return torch.arange(span.start, span.stop) if chosen is None else span.start + chosen


def _told(scheme: Scheme) -> str:
    tile = scheme.format.tile
    size = "" if tile is None or tile[1] is None else f" with groups of {tile[1]}"
    return f"{scheme.format.name}{size}" if tile is None or tile[0] == 1 else f"{scheme.format.name} in tiles of {tile}"


def _spelt(name: str, spelling: Spelling) -> str:
    for ours, theirs in spelling:
        name = name.replace(ours, theirs)
    return name


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
