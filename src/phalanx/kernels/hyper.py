"""Hyper-connections: how several residual streams become what a part takes, and take in what it gives."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from phalanx.spec.hyper import Hyper


class Weights(NamedTuple):
    """One linear map of all streams of a token, its bias, and a factor for each of the things that it makes."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float


class Mixing(NamedTuple):
    """What a part gives to each stream, [tokens, streams], and what they give to each other, [tokens, from, to]."""

    post: Tensor
    comb: Tensor


def part_streams(streams: Tensor, weights: Weights, hyper: Hyper) -> tuple[Tensor, Mixing]:
    """What a part takes of streams, [tokens, streams, hidden], and how they go on; all weights in float32."""
    if streams.is_cuda:
        from phalanx.kernels.gpu import hyper as gpu

        mapped = F.linear(streams.flatten(1).float(), weights.fn)
        taken, post, comb = gpu.part_streams(streams, mapped, weights.base, weights.scale, weights.norm_eps, hyper)
        return taken, Mixing(post, comb)
    return part_streams_torch(streams, weights, hyper)


def part_streams_torch(streams: Tensor, weights: Weights, hyper: Hyper) -> tuple[Tensor, Mixing]:
    """The definition."""
    count = hyper.streams
    sizes = [count, count, count * count]
    made = zip(_mapped(streams, weights).split(sizes, -1), weights.scale, weights.base.split(sizes), strict=True)
    pre, post, comb = (part * factor + base for part, factor, base in made)
    mixing = Mixing(2 * post.sigmoid(), _balanced(comb.unflatten(-1, (count, count)), hyper))
    return _joined(streams, pre, hyper), mixing


def join_streams(streams: Tensor, weights: Weights, hyper: Hyper) -> Tensor:
    """One stream, [tokens, hidden], of all of them."""
    return _joined(streams, _mapped(streams, weights) * weights.scale + weights.base, hyper)


def mix_streams(streams: Tensor, given: Tensor, mixing: Mixing) -> Tensor:
    """The streams behind a part that gives `given`, [tokens, hidden]."""
    if streams.is_cuda:
        from phalanx.kernels.gpu import hyper as gpu

        return gpu.mix_streams(streams, given, *mixing)
    return mix_streams_torch(streams, given, mixing)


def mix_streams_torch(streams: Tensor, given: Tensor, mixing: Mixing) -> Tensor:
    """The definition."""
    post, comb = (each.to(streams.dtype) for each in mixing)
    return post[..., None] * given[:, None] + comb.transpose(1, 2) @ streams


def _mapped(streams: Tensor, weights: Weights) -> Tensor:
    flat = streams.flatten(1).float()
    return F.linear(flat * (flat.square().mean(-1, keepdim=True) + weights.norm_eps).rsqrt(), weights.fn)


def _joined(streams: Tensor, pre: Tensor, hyper: Hyper) -> Tensor:
    return ((pre.sigmoid() + hyper.eps)[..., None] * streams).sum(1).to(streams.dtype)


def _balanced(comb: Tensor, hyper: Hyper) -> Tensor:
    """Rows and columns that sum to 1, as far as so many rounds bring them there."""
    comb = comb.softmax(-1) + hyper.eps
    comb = comb / (comb.sum(-2, keepdim=True) + hyper.eps)
    for _ in range(hyper.rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hyper.eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hyper.eps)
    return comb
