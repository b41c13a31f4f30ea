"""Sampling: one token for each row of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.engine.output import NO_TOKEN
from phalanx.kernels import cpu
from phalanx.kernels.sampling_table import ONE, TOKEN


def likeliest(scores: Tensor) -> Tensor:
    """The column of each row's largest score, or of a NaN; with a kernel the first of equals."""
    if scores.is_cuda:
        from phalanx.kernels.gpu import sampling as gpu

        return gpu.likeliest(scores)
    if cpu.runs(scores) and scores.is_contiguous() and scores.shape[1]:
        found = torch.empty(len(scores), dtype=TOKEN)
        cpu.call("likeliest", scores, found, *scores.shape)
        return found
    return scores.argmax(-1).to(TOKEN)


def flag_broken(tokens: Tensor, scores: Tensor) -> Tensor:
    """Tokens as they are told: NO_TOKEN for rows whose best score is NaN or infinite, which is the one chosen there."""
    if scores.is_cuda:
        from phalanx.kernels.gpu import sampling as gpu

        return gpu.flag_broken(tokens, scores)
    return flag_broken_torch(tokens, scores)


def flag_broken_torch(tokens: Tensor, scores: Tensor) -> Tensor:
    """The definition."""
    chosen = scores.gather(1, tokens[:, None].long())[:, 0]
    return tokens.where(chosen.isfinite(), NO_TOKEN)


def draw(scores: Tensor, table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """A token for each row of scores, by the parameters in the table's row `slots[row]` (see `pack`).

    Scores are scaled by temperature and cut by min-p, top-k and top-p, in that order and by value: what ties with the
    last one kept is kept. The random number, of seed and position alone, inverts the cumulative sum of what is left, in
    the vocabulary's own order: a row's token does not depend on other rows. A row whose best score is not finite gives
    the column of that score.
    """
    if scores.is_cuda:
        from phalanx.kernels.gpu import sampling as gpu

        return gpu.draw(scores, table, slots, positions)
    return draw_torch(scores, table, slots, positions)


def draw_torch(scores: Tensor, table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    tokens, best = likeliest(scores), scores.amax(-1)
    drawn = ((table[slots, 2] != 0) & best.isfinite()).nonzero()[:, 0]
    if not len(drawn):
        return tokens
    seeds, top_k, *real = table[slots[drawn]].split(1, 1)
    temperature, top_p, min_p = (column.view(torch.float64) for column in real)
    depth = (scores[drawn].float() - best[drawn, None].float()) * (1 / temperature.float())
    depth.masked_fill_(depth < min_p.log().float(), float("-inf"))
    weights = _weights(_keep_top(depth, top_k, top_p))
    tokens[drawn] = _invert(weights, uniform(seeds[:, 0], positions[drawn]))
    return tokens


def _weights(depth: Tensor) -> Tensor:
    """Whole numbers, whose sums are exact in any order. A token of weight zero is never drawn."""
    return (depth.double().exp() * ONE).long()


def _keep_top(depth: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf for what lies below the k-th best, then for what lies below the last one that top-p needs.

    Sorting goes only as deep as the largest top-k.
    """
    vocab = depth.shape[1]
    limits = top_k.where(top_k > 0, vocab).clamp(max=vocab)
    is_whole = top_p == 1.0
    if bool((is_whole & (limits == vocab)).all()):
        return depth
    best = depth.topk(int(limits.max()), dim=-1).values
    kept = depth.masked_fill(depth < best.gather(1, limits - 1), float("-inf"))
    if bool(is_whole.all()):
        return kept
    weights = _weights(best)
    before, enough = weights.cumsum(-1) - weights, top_p * _weights(kept).sum(-1, keepdim=True)
    needed = (before < enough).sum(-1, keepdim=True).clamp(min=1).where(~is_whole, limits)
    return kept.masked_fill(kept < best.gather(1, needed - 1), float("-inf"))


def _invert(weights: Tensor, draws: Tensor) -> Tensor:
    """The first column whose cumulative weight exceeds the draw."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    targets = (draws[:, None] * total).long().minimum(total - 1)
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].to(TOKEN)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Random numbers in [0, 1) that depend on nothing but seed and position (splitmix64)."""
    state = seeds * _signed(0x9E3779B97F4A7C15) + (positions + 1) * _signed(0xD1342543DE82EF95)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return _shifted(state, 11).double() * 2.0**-53


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(words: Tensor, by: int) -> Tensor:
    """To the right, without the sign."""
    return (words >> by) & (2 ** (64 - by) - 1)
