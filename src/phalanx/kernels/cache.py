"""The paged cache of keys and values, as they are computed or in FP8, and what is applied to heads on their way in."""

from __future__ import annotations

import mmap
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.fp8 import E4M3, LARGEST


class HeadNorms(NamedTuple):
    """The RMS norms that some models apply to each query and key head."""

    query: Tensor
    key: Tensor
    eps: float


class CacheScales(NamedTuple):
    """What the elements of a layer's FP8 cache are multiplied by to give its keys and values."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = CacheScales()


class Fresh(NamedTuple):
    """What is still to be done to the heads of a step: query and key heads are turned by cos and sin, keys and values
    written to their places in the flattened cache.
    """

    cos: Tensor
    sin: Tensor
    write_to: Tensor
    scales: CacheScales


_WORTH_A_MAPPING = 2**20
"""Bytes."""


def zeros(like: Tensor, *shape: int) -> Tensor:
    """like.new_zeros(shape). On a CPU they are fresh pages, which are zero and are taken when they are written to."""
    size = prod(shape) * like.element_size()
    if not like.is_cpu or size < _WORTH_A_MAPPING:
        return like.new_zeros(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8, count=size).view(like.dtype).view(shape)


def store(cache: Tensor, write_to: Tensor, kv: Tensor, scales: CacheScales = UNSCALED) -> None:
    """Write keys and values, [tokens, 2, kv_heads, head_dim], to their places in the flattened cache."""
    places = cache.flatten(0, 1)
    if cache.dtype is E4M3:
        places, kv = places.view(torch.uint8), in_fp8(kv, scales).view(torch.uint8)
    places.index_copy_(0, write_to, kv)


def in_fp8(kv: Tensor, scales: CacheScales) -> Tensor:
    """Keys and values, [tokens, 2, kv_heads, head_dim], in e4m3. What is too large becomes the largest, never NaN."""
    inverse = torch.tensor([1 / scales.key, 1 / scales.value], dtype=torch.float32, device=kv.device)
    return (kv.float() * inverse[:, None, None]).clamp(-LARGEST, LARGEST).to(E4M3)


def take(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Some blocks of the cache as they are computed with; those of an FP8 cache without their scales."""
    if cache.dtype is E4M3:
        return cache.view(torch.uint8).index_select(0, blocks).view(E4M3).to(dtype)
    return cache.index_select(0, blocks)
