"""RMSNorm, whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx.kernels.fp8 import Activations, Form
from phalanx.kernels.norm import add_rms_norm, add_rms_norm_in
from phalanx.kernels.pairs import Unsummed
from phalanx.layers.place import Place


class RmsNorm:
    def __init__(self, place: Place, name: str, eps: float | None = None) -> None:
        self.name = name
        self.group = place.group
        self.weight = place.empty_for(f"{name}.weight")
        self.eps = place.spec.norm_eps if eps is None else eps

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", self.weight

    def __call__(self, x: Tensor) -> Tensor:
        return add_rms_norm(x, None, self.weight, self.eps)

    def given_as(self, form: Form, x: Tensor) -> Activations:
        """The same, as the next product takes it."""
        return add_rms_norm_in(form, x, None, self.weight, self.eps)

    def of_sum(self, part: Tensor | Unsummed, residual: Tensor, form: Form) -> Activations:
        """The norm of residual + the sum of all ranks' parts, which is then kept in `residual`. One rank alone may have
        pairs.
        """
        if isinstance(part, Unsummed):
            return add_rms_norm_in(form, part, residual, self.weight, self.eps)
        return self.group.all_reduce_add_norm(part, residual, self.weight, self.eps, form)
