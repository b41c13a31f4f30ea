"""What becomes of each tensor of a checkpoint's files when it is quantised, and which of ours lie in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.spec import ModelSpec, Scheme
from phalanx.spec.tensors import Stored
from phalanx.spec.tensors import Tensor as TensorSpec
from phalanx.weights.balance import Factors
from phalanx.weights.views import ViewReader, rows_of


@dataclass(frozen=True)
class Rewritten:
    """A tensor as it is to be written: under `name`, from the file's `stored` one, in which `parts` of ours lie.

    An expert's matrix out of a stack is written on its own, as the formats have it; what lies fused stays fused.
    """

    name: str
    stored: str
    parts: tuple[tuple[TensorSpec, Stored], ...] = ()

    @property
    def is_linear(self) -> bool:
        return bool(self.parts) and all(tensor.is_linear for tensor, _ in self.parts)

    @property
    def plus(self) -> float:
        """What is added to the values before they are used."""
        return self.parts[0][1].plus if self.parts else 0.0

    def read(self, reader: ViewReader) -> Tensor:
        if self.name == self.stored:
            return reader.read_stored(self.stored)
        (expert, _), *_ = self.parts
        return reader.read(expert.name, tuple(slice(0, size) for size in expert.shape)).contiguous()

    def change(self, factors: dict[str, Factors]) -> Factors:
        """Of the whole tensor, by those of its parts, which share their columns."""
        found = [(tensor, stored, factors[tensor.name]) for tensor, stored in self.parts if tensor.name in factors]
        columns = next((change.columns for *_, change in found if change.columns is not None), None)
        if all(change.rows is None for *_, change in found):
            return Factors(columns=columns)
        rows = torch.ones(sum(tensor.shape[0] for tensor, _ in self.parts))
        for tensor, stored, change in found:
            if change.rows is not None:
                rows[rows_of(stored.run, tensor.shape[0])] = change.rows
        return Factors(rows, columns)


def rewritten(spec: ModelSpec, reader: ViewReader) -> list[Rewritten]:
    """All tensors of the files, those of the model first. What the model does not use stays as it was."""
    parts: dict[tuple[str, str], list[tuple[TensorSpec, Stored]]] = {}
    for tensor in spec.tensors.values():
        name, stored = reader.place(tensor.name)
        written = _apart(name, stored, tensor) if tensor.is_linear and stored.stacked else name
        parts.setdefault((written, name), []).append((tensor, stored))
    known = {name for _, name in parts}
    return [
        *(Rewritten(written, name, tuple(inside)) for (written, name), inside in parts.items()),
        *(Rewritten(name, name) for name in reader.names() if name not in known),
    ]


def _apart(name: str, stored: Stored, tensor: TensorSpec) -> str:
    """What an expert's own matrix is called beside the stack that it comes from."""
    beside, here = (each.rpartition(".")[0] for each in (stored.name, name))
    return here + tensor.stored_name.removeprefix(beside)


def check_whole(tensors: list[Rewritten], scheme: Scheme) -> None:
    """Refuse matrices in one of which an element of the format would be of several of ours."""
    tall = max(piece.tall or 1 for piece in scheme.pieces)
    for fused in tensors:
        for tensor, stored in fused.parts if fused.is_linear and fused.name == fused.stored else ():
            if stored.run and any(number % tall for number in stored.run):
                raise CheckpointError(
                    "not_quantizable",
                    f"{fused.name} holds several matrices, {tensor.name} in {stored.run.width} rows of every "
                    f"{stored.run.stride}, and {scheme.format.name} has an element for every {tall}.",
                    "Use fp8-channel, which has a scale for each row.",
                )
