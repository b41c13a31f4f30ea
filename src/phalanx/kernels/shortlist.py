"""The best of a head's outputs by scores that are a little off: those that may be it are scored again, exactly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.candidates import CANDIDATES, COMBS, BestTokens
from phalanx.kernels.sampling_table import TOKEN


def look_again(scores: Tensor, hidden: Tensor, weight: Tensor, first: int = 0) -> BestTokens:
    """The best of each comb of a row's scores, and of these the best 16, are scored again as hidden @ weight.T, in
    place. The best of those is found, the first of equals; the first column is this token. What is not a number is
    never the best, if there is anything else.
    """
    if scores.is_cuda:
        from phalanx.kernels.gpu import shortlist as gpu

        return gpu.look_again(scores, hidden, weight, first)
    return look_again_torch(scores, hidden, weight, first)


def look_again_torch(scores: Tensor, hidden: Tensor, weight: Tensor, first: int = 0) -> BestTokens:
    """The definition."""
    columns = _candidates(scores)
    again = torch.einsum("rch,rh->rc", weight[columns].float(), hidden.float()).to(scores.dtype)
    scores.scatter_(1, columns, again)
    best, column = _first_best(_known(again), columns)
    token = first + column
    return BestTokens(token.to(TOKEN), torch.stack((best, token.float()), 1))


def _candidates(scores: Tensor) -> Tensor:
    width = scores.shape[1]
    combs = F.pad(_known(scores), (0, -width % COMBS), value=float("-inf")).unflatten(1, (-1, COMBS)).transpose(1, 2)
    column = torch.arange(combs[0].numel(), device=scores.device).view(-1, COMBS).t()
    best, column = _first_best(combs, column)
    return column.gather(1, best.sort(dim=1, descending=True, stable=True).indices[:, : min(CANDIDATES, width)])


def _known(scores: Tensor) -> Tensor:
    return scores.float().nan_to_num(float("-inf"), float("inf"), float("-inf"))


def _first_best(values: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value along the last dimension, and the least of the numbers that have it."""
    best = values.amax(-1, keepdim=True)
    return best[..., 0], torch.where(values == best, numbers, numbers.max()).amin(-1)


def best_of_ranks(scored: Tensor) -> Tensor:
    """The token of the best score, the first of equals, where every rank brings one of each, [rows, 2 x ranks]."""
    if scored.is_cuda:
        from phalanx.kernels.gpu import shortlist as gpu

        return gpu.best_of_ranks(scored)
    return best_of_ranks_torch(scored)


def best_of_ranks_torch(scored: Tensor) -> Tensor:
    """The definition. What no rank brings is no token."""
    scores, tokens = scored.unflatten(1, (-1, 2)).unbind(-1)
    return _first_best(scores, tokens)[1].clamp(min=0).to(TOKEN)
