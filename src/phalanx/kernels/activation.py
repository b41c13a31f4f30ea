"""The gate of a gated MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
