"""RMSNorm, whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx.kernels.fp8 import Quantised
from phalanx.kernels.norm import add_rms_norm, add_rms_norm_quantised
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

    def quantised(self, x: Tensor) -> Quantised:
        """The same, for a product that takes FP8."""
        return add_rms_norm_quantised(x, None, self.weight, self.eps)

    def of_sum(self, part: Tensor, residual: Tensor, quantised: bool) -> Tensor | Quantised:
        """The norm of residual + the sum of all ranks' parts, which is then kept in `residual`."""
        return self.group.all_reduce_add_norm(part, residual, self.weight, self.eps, quantised)
