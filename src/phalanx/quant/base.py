"""What layers and loader ask of a quantised format."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from phalanx.kernels.gemm import Held, Product
from phalanx.spec.schemes import Role, Scheme

Pieces = dict[Role, Tensor]
Slices = tuple[slice, ...]


class SchemeAtWork(ABC):
    """`slices` are always those of the part of the matrix that pieces were read for: they may begin within a tile."""

    keeps = False
    """Whether a GPU multiplies weights as they are stored; otherwise they are widened."""

    in_panels = False
    """Whether a CPU does, once they are laid out in panels."""

    in_one_order = False
    """Whether its sums are then the same bit for bit however many rows there are."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    @abstractmethod
    def widen(self, pieces: Pieces, slices: Slices) -> Tensor:
        """In float32."""

    @abstractmethod
    def empty(self, stack: tuple[int, ...], rows: list[int], columns: int, device: torch.device) -> Held:
        """Memory for matrices of these heights, one below the other."""

    @abstractmethod
    def fill(self, target: Held, pieces: Pieces, slices: Slices, order: Tensor | None) -> None:
        """Take over a part as it is stored, its rows in this order."""

    def obstacle(self, pieces: Pieces, slices: Slices) -> str | None:
        """What in these values, if anything, is not what the format allows."""
        return None

    checked: tuple[Role, ...] = ()
    """The pieces that `obstacle` looks at."""


class GpuScheme(SchemeAtWork):
    """A format that a GPU multiplies as it is stored, and that matrices can be brought to."""

    keeps = True

    @abstractmethod
    def round(self, target: Held, values: Tensor) -> None:
        """Bring a matrix to this format."""

    @abstractmethod
    def product(self, weight: Held, bias: Tensor | None, dtype: torch.dtype) -> Product: ...
