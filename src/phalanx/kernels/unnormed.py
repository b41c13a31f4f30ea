"""What a norm is made of, for a kernel that does more in the same launch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from phalanx.kernels.fp8 import Form


class Unnormed(NamedTuple):
    """The norm of x + residual is wanted, in this form. That sum goes to `kept`, not in place: several programs read
    the row.
    """

    x: Tensor
    residual: Tensor
    kept: Tensor
    weight: Tensor
    eps: float
    form: Form
