"""RMSNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension; the mean is taken in float32."""
    if x.dtype == weight.dtype and x.element_size() == 4:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    return weight * (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
