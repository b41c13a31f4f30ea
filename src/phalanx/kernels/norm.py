"""RMSNorm, with the residual added on the way in."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.fp8 import Activations, Form, InBoth, Quantised
from phalanx.kernels.pairs import Unsummed, summed_torch
from phalanx.kernels.quantise import quantise


def add_rms_norm(x: Tensor | Unsummed, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Norm of x + residual over the last dimension; the sum is kept in `residual`, in place. x may be pairs to sum."""
    if weight.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        normed = gpu.add_rms_norm(x, residual, weight, eps)
        assert isinstance(normed, Tensor)
        return normed
    x = summed_torch(x) if isinstance(x, Unsummed) else x
    if cpu.runs(x) and (residual is None or x.is_contiguous()):
        x = x.contiguous()
        out = torch.empty_like(x)
        cpu.call("add_rms_norm", x, residual, weight, out, x.numel() // x.shape[-1], x.shape[-1], eps)
        return out
    return add_rms_norm_torch(x, residual, weight, eps)


def add_rms_norm_quantised(x: Tensor | Unsummed, residual: Tensor | None, weight: Tensor, eps: float) -> Quantised:
    """The same, brought to FP8 on the way out."""
    if weight.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        normed = gpu.add_rms_norm(x, residual, weight, eps, Form.FP8)
        assert isinstance(normed, Quantised)
        return normed
    return quantise(add_rms_norm(x, residual, weight, eps))


def add_rms_norm_both(x: Tensor | Unsummed, residual: Tensor | None, weight: Tensor, eps: float) -> InBoth:
    """The same as it is, and beside it brought to FP8."""
    if weight.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        normed = gpu.add_rms_norm(x, residual, weight, eps, Form.BOTH)
        assert isinstance(normed, InBoth)
        return normed
    plain = add_rms_norm(x, residual, weight, eps)
    return InBoth(plain, quantise(plain))


_NORMS: dict[Form, Callable[[Tensor | Unsummed, Tensor | None, Tensor, float], Activations]] = {
    Form.PLAIN: add_rms_norm,
    Form.FP8: add_rms_norm_quantised,
    Form.BOTH: add_rms_norm_both,
}


def add_rms_norm_in(
    form: Form, x: Tensor | Unsummed, residual: Tensor | None, weight: Tensor, eps: float
) -> Activations:
    """The one of these that gives this form."""
    return _NORMS[form](x, residual, weight, eps)


def add_rms_norm_torch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The definition: weight * h / sqrt(mean(h^2) + eps), the mean in float32, and all where the weight is float32."""
    h = x if residual is None else residual.add_(x)
    if h.dtype == torch.float32:
        return F.rms_norm(h, weight.shape, weight, eps)
    wide = h.float()
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (weight * normed).to(h.dtype) if weight.dtype is torch.float32 else weight * normed.to(h.dtype)
