"""The gates of gated MLPs and of gated attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.fp8 import Quantised
from phalanx.kernels.quantise import quantise
from phalanx.spec.ffn import SILU, Activation

CLAMPED_SLOPE = 1.702


def gate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """What an MLP's gate makes of the two halves of each row."""
    if gate_up.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        product = gpu.gate_and_mul(gate_up, activation)
        assert isinstance(product, Tensor)
        return product
    return silu_and_mul(gate_up) if activation == SILU else gate_and_mul_torch(gate_up, activation)


def gate_and_mul_quantised(gate_up: Tensor, activation: Activation) -> Quantised:
    """The same, brought to FP8 on the way out."""
    if gate_up.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        product = gpu.gate_and_mul(gate_up, activation, quantised=True)
        assert isinstance(product, Quantised)
        return product
    return quantise(gate_and_mul(gate_up, activation))


def gate_and_mul_torch(gate_up: Tensor, activation: Activation) -> Tensor:
    """The definition."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.kind == "clamped":
        return (up + 1) * (gate * torch.sigmoid(gate * CLAMPED_SLOPE))
    return (F.gelu(gate, approximate="tanh") if activation.kind == "gelu" else F.silu(gate)) * up


def sigmoid(x: Tensor) -> Tensor:
    """Of a number the same bits wherever it stands, which on some CPUs torch's own does not give."""
    if cpu.runs(x):
        out = x.new_empty(x.shape)
        cpu.call("sigmoid", x.contiguous(), out, x.numel())
        return out
    return torch.sigmoid(x)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of each row."""
    if gate_up.is_cuda:
        return gate_and_mul(gate_up, SILU)
    if cpu.runs(gate_up) and gate_up.is_contiguous():
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        cpu.call("silu_and_mul", gate_up, out, rows, width)
        return out
    return silu_and_mul_torch(gate_up)


def silu_and_mul_quantised(gate_up: Tensor) -> Quantised:
    """The same, brought to FP8 on the way out."""
    return gate_and_mul_quantised(gate_up, SILU)


def silu_and_mul_torch(gate_up: Tensor) -> Tensor:
    """The definition."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x by the sigmoid of its gate."""
    if x.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        product = gpu.sigmoid_and_mul(x, gate)
        assert isinstance(product, Tensor)
        return product
    return x * sigmoid(gate)


def sigmoid_and_mul_quantised(x: Tensor, gate: Tensor) -> Quantised:
    """The same, brought to FP8 on the way out."""
    if x.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        product = gpu.sigmoid_and_mul(x, gate, quantised=True)
        assert isinstance(product, Quantised)
        return product
    return quantise(sigmoid_and_mul(x, gate))


def sigmoid_and_mul_torch(x: Tensor, gate: Tensor) -> Tensor:
    """The definition."""
    return x * torch.sigmoid(gate)
