"""Triton kernels for CUDA. Each computes what the torch function of the same name, one folder up, defines.

Every kernel may be launched before the one ahead of it has ended (programmatic dependent launch): it lets the next one
come as soon as it starts itself, and waits for the one ahead before it touches memory that a kernel may have written.
"""

from phalanx.kernels.gpu.attention import decode_attention, prefill_attention
from phalanx.kernels.gpu.gemm import fp8_product, product
from phalanx.kernels.gpu.moe import fused_experts, route
from phalanx.kernels.gpu.rows import add_rms_norm, quantise, rotate_and_store, silu_and_mul
from phalanx.kernels.gpu.sampling import draw, likeliest

__all__ = [
    "add_rms_norm",
    "decode_attention",
    "draw",
    "fp8_product",
    "fused_experts",
    "likeliest",
    "prefill_attention",
    "product",
    "quantise",
    "rotate_and_store",
    "route",
    "silu_and_mul",
]
