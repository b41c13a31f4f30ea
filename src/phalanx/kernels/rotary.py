"""Rotary position embedding, half-split as Hugging Face checkpoints store it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.kernels import cpu
from phalanx.kernels.cache import UNSCALED, CacheScales, HeadNorms, store
from phalanx.kernels.norm import add_rms_norm
from phalanx.spec import Rope


def inverse_frequencies(rope: Rope) -> Tensor:
    """One frequency for each pair of rotated dimensions, stretched for long contexts as `rope.kind` says."""
    plain = rope.theta ** -(torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain / torch.tensor(rope.divisors) if rope.kind == "longrope" else plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    turns = rope.original_max_positions * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = (turns > rope.low_freq_factor).float() if span == 0 else ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(rope: Rope, plain: Tensor) -> Tensor:
    """Like llama3, but blended linearly over dimensions between two numbers of turns."""

    def dimension(turns: float) -> float:
        ratio = rope.original_max_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch = ramp.clamp(0, 1)
    return plain * (1 - stretch) + plain / rope.factor * stretch


def cos_and_sin(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin at these positions, [tokens, 1, rotary_dim], ready for `apply_rotary`."""
    if positions.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        return gpu.cos_and_sin(positions, frequencies, factor, dtype)
    return cos_and_sin_torch(positions, frequencies, factor, dtype)


def cos_and_sin_torch(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The definition, in float32."""
    angles = positions.float()[:, None, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_to: Tensor,
    cache: Tensor,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None = None,
    scales: CacheScales = UNSCALED,
    steady: bool = False,
) -> None:
    """Norm and rotate the query and key heads of qkv in place, then write keys and values to their places in the cache.

    qkv is [tokens, heads + 2 * kv_heads, head_dim], the cache [blocks, block_size, 2, kv_heads, head_dim]; `write_to`
    is each token's place in the flattened cache. `scales` are an FP8 cache's. `steady`: a token has the same bits
    whatever tokens are beside it.
    """
    if qkv.is_cuda:
        from phalanx.kernels.gpu import rows as gpu

        gpu.rotate_and_store(qkv, cos, sin, write_to, cache, heads, kv_heads, norms, scales, steady)
        return
    if norms is not None:
        norm_heads(qkv, heads, kv_heads, norms)
    if cpu.runs(cache) and qkv.is_contiguous():
        tokens, _, head_dim = qkv.shape
        cpu.call("rotate_and_store", qkv, cos, sin, write_to, cache, tokens, heads, kv_heads, head_dim, cos.shape[-1])
    else:
        rotate_and_store_torch(qkv, cos, sin, write_to, cache, heads, kv_heads, scales)


def norm_heads(qkv: Tensor, heads: int, kv_heads: int, norms: HeadNorms) -> None:
    """Each query and key head over its own dimensions, in place."""
    q, k, _ = qkv.split([heads, kv_heads, kv_heads], dim=1)
    q.copy_(add_rms_norm(q, None, norms.query, norms.eps))
    k.copy_(add_rms_norm(k, None, norms.key, norms.eps))


def rotate_and_store_torch(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_to: Tensor,
    cache: Tensor,
    heads: int,
    kv_heads: int,
    scales: CacheScales = UNSCALED,
) -> None:
    """The definition."""
    rotated = qkv[:, : heads + kv_heads]
    rotated.copy_(apply_rotary(rotated, cos, sin))
    store(cache, write_to, qkv[:, heads:].unflatten(1, (2, kv_heads)), scales)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of each head. x is [tokens, heads, head_dim], cos and sin [tokens, 1, rotary_dim]."""
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((apply_rotary(x[..., :width], cos, sin), x[..., width:]), -1)
    return torch.addcmul(x * cos, x.roll(width // 2, dims=-1), sin)
