"""Greedy sampling."""

from __future__ import annotations

from torch import Tensor


def likeliest(scores: Tensor) -> Tensor:
    """The column of each row's largest score; on a GPU the first of equals."""
    if scores.is_cuda:
        from phalanx.kernels import gpu

        return gpu.likeliest(scores)
    return scores.argmax(-1)
