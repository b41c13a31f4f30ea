"""Activations brought to FP8: one scale for each 128 columns of a row."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.fp8 import E4M3, GROUP, LARGEST, Quantised


def quantise(x: Tensor) -> Quantised:
    """Each group of 128 columns of a row divided by what brings its largest value to 448."""
    if x.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        return gpu.quantise(x)
    return quantise_torch(x)


def quantise_torch(x: Tensor) -> Quantised:
    """The definition."""
    rows, width = x.shape
    groups = F.pad(x.float(), (0, -width % GROUP)).view(rows, -1, GROUP)
    scales = groups.abs().amax(-1).clamp_min(1e-10) / LARGEST
    values = (groups / scales[..., None]).to(E4M3).view(rows, -1)[:, :width]
    return Quantised(values.contiguous(), scales.t().contiguous().t())
