"""What a token leaves in a cache of latents, and products with a matrix for every head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu.early import let_next_start, starts_early, wait_for_ahead


@triton.jit
def _keep_latents(
    entered, weight, cos, sin, write_to, cache, kept, stride, eps, RANK: tl.constexpr, ROPE: tl.constexpr,
    RANK_WIDE: tl.constexpr, HALF_WIDE: tl.constexpr,
):  # fmt: skip
    """One token: its latent normed, its key turned."""
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = ROPE // 2
    d, h = tl.arange(0, RANK_WIDE), tl.arange(0, HALF_WIDE)
    inside, known = d < RANK, h < half
    scale = tl.load(weight + d, mask=inside, other=0.0)
    wait_for_ahead()
    source = entered + token * stride
    latent = tl.load(source + d, mask=inside, other=0.0)
    wide = latent.to(tl.float32)
    latent = scale * (wide * tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps)).to(latent.dtype)
    low = tl.load(source + RANK + h, mask=known, other=0.0)
    high = tl.load(source + RANK + half + h, mask=known, other=0.0)
    at = token * ROPE + h
    low_cos, high_cos = tl.load(cos + at, mask=known, other=0.0), tl.load(cos + half + at, mask=known, other=0.0)
    low_sin, high_sin = tl.load(sin + at, mask=known, other=0.0), tl.load(sin + half + at, mask=known, other=0.0)
    turned_low = (low.to(tl.float32) * low_cos + high.to(tl.float32) * low_sin).to(low.dtype)
    turned_high = (high.to(tl.float32) * high_cos + low.to(tl.float32) * high_sin).to(low.dtype)
    entry = cache + tl.load(write_to + token) * (RANK + ROPE)
    tl.store(entry + d, latent, mask=inside)
    tl.store(entry + RANK + h, turned_low, mask=known)
    tl.store(entry + RANK + half + h, turned_high, mask=known)
    copy = kept + token * (RANK + ROPE)
    tl.store(copy + d, latent, mask=inside)
    tl.store(copy + RANK + h, turned_low, mask=known)
    tl.store(copy + RANK + half + h, turned_high, mask=known)


def keep_latents(
    entered: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, write_to: Tensor, cache: Tensor
) -> Tensor:
    tokens, rank = len(entered), len(weight)
    rope = entered.shape[1] - rank
    kept = entered.new_empty(tokens, rank + rope)
    _keep_latents[(tokens,)](
        entered, weight, cos, sin, write_to, cache, kept, entered.stride(0), eps, RANK=rank, ROPE=rope,
        RANK_WIDE=triton.next_power_of_2(rank), HALF_WIDE=triton.next_power_of_2(rope // 2), num_warps=2,
        launch_pdl=starts_early(),
    )  # fmt: skip
    return kept
