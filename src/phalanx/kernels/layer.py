"""A whole decoder layer in one call (see layer.c): with few rows, calling its parts costs as much as they do."""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.attention import Sight
from phalanx.kernels.gemm import Gemm, PanelGemm
from phalanx.kernels.tiling import DecodeRows


class _Record(ctypes.Structure):
    """`struct layer` of layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mixer_norm", "ffn_norm", "qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        *((name, ctypes.c_void_p) for name in ("cache", "sinks")),
        *((name, ctypes.c_longlong) for name in ("hidden", "heads", "kv_heads", "head_dim", "inner", "block_size")),
        *((name, ctypes.c_longlong) for name in ("window", "chunked", "is_dense")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("halfway", ctypes.c_longlong),
    )


class _Dense(ctypes.Structure):
    """`struct dense` of layer.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("rows", "columns", "apart")),
    )

    @classmethod
    def of(cls, weight: Tensor) -> _Dense:
        return cls(weight.data_ptr(), *weight.shape, weight.stride(0))


_FEW = 4
"""Rows up to which products in float32 need no copy of what they take (see `gemm.skinny_gemm`)."""


class LayerParts(NamedTuple):
    """A layer x + attention(norm(x)), then the same with a SiLU-gated MLP.

    All matrices are panels of whole numbers, or all are in float32.
    """

    mixer_norm: Tensor
    ffn_norm: Tensor
    products: tuple[PanelGemm, ...] | tuple[Gemm, ...]
    cache: Tensor
    heads: int
    sight: Sight
    eps: float
    scale: float


class WholeLayer:
    """Computes, bit for bit, what the kernels of its parts do. It keeps all that the record points at."""

    def __init__(self, parts: LayerParts) -> None:
        self.parts = parts
        _, block_size, _, kv_heads, head_dim = parts.cache.shape
        sight, products = parts.sight, parts.products
        self._dense = [_Dense.of(product.weight) for product in products if isinstance(product, Gemm)]
        packed = [product.pack() for product in products if isinstance(product, PanelGemm)]
        self.most_rows = _FEW if self._dense else sys.maxsize
        self._record = _Record(
            parts.mixer_norm.data_ptr(),
            parts.ffn_norm.data_ptr(),
            *(panels.address for panels in packed),
            *map(ctypes.addressof, self._dense),
            *(_address(product.bias) for product in products),
            parts.cache.data_ptr(),
            _address(sight.sinks),
            *(len(parts.mixer_norm), parts.heads, kv_heads, head_dim, products[-1].weight.shape[1], block_size),
            *(sight.window or 0, int(sight.chunked), int(bool(self._dense))),
            *(parts.eps, parts.scale),
            0,
        )
        self._address = ctypes.addressof(self._record)

    def __call__(
        self,
        residual: Tensor,
        part: Tensor | None,
        turns: tuple[Tensor, Tensor],
        write_to: Tensor,
        rows: DecodeRows,
    ) -> Tensor:
        """Add `part` to the residual and give what is to be added next, in the memory of `part` where there is one."""
        out = torch.empty_like(residual) if part is None else part
        cos, sin = turns
        cpu.call(
            "whole_layer",
            *(self._address, residual, part, out, cos, sin, write_to, rows.slots, rows.tables, rows.positions),
            *(residual.shape[0], rows.tables.stride(0), cos.shape[-1]),
        )
        return out

    @property
    def halfway(self) -> int:
        """When the last call went on from the mixer to the FFN, in ns of the monotonic clock."""
        return int(self._record.halfway)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
