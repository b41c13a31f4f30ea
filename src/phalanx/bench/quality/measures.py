"""Numbers of two models over the same tokens, each with an interval by resampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES = 1000
_INTERVAL = (0.025, 0.975)


class Figure(NamedTuple):
    """A number and the interval that holds 95 of 100 times; None where there is nothing to resample."""

    value: float
    low: float | None = None
    high: float | None = None


class Seen(NamedTuple):
    """Sums over the tokens of one text: how surprised each model was, how often both had the same favourite, and by how
    much the second's distribution is off (in nats, as KL of the first's to it).
    """

    tokens: float
    first_nll: float
    second_nll: float
    agreed: float
    divergence: float


def look(first: Tensor, second: Tensor, tokens: Sequence[int]) -> Seen:
    """Logits of both at every position; each predicts the token behind it."""
    wanted = torch.tensor(list(tokens[1:]), device=first.device)[:, None]
    ours, theirs = (torch.log_softmax(scores[:-1].double(), -1) for scores in (first, second.to(first.device)))
    kept = ours.exp()
    return Seen(
        len(wanted),
        -ours.gather(1, wanted).sum().item(),
        -theirs.gather(1, wanted).sum().item(),
        (ours.argmax(-1) == theirs.argmax(-1)).sum().item(),
        torch.where(kept > 0, kept * (ours - theirs), 0.0).sum().item(),
    )


def figures(seen: Sequence[Seen]) -> dict[str, Figure]:
    """Of all texts together; intervals by drawing as many texts anew, the same ones for both models."""
    rows = torch.tensor(seen, dtype=torch.float64)
    drawn = rows[draws(len(seen))].sum(1) if len(seen) > 1 else None
    return {
        name: _figure(of(rows.sum(0)[None]), of(drawn) if drawn is not None else None)
        for name, of in _STATISTICS.items()
    }


def draws(count: int, resamples: int = RESAMPLES) -> Tensor:
    """Which texts each resample has; the same ones every time."""
    return torch.randint(count, (resamples, count), generator=torch.Generator().manual_seed(0))


def _figure(value: Tensor, drawn: Tensor | None) -> Figure:
    if drawn is None:
        return Figure(value.item())
    low, high = torch.quantile(drawn, torch.tensor(_INTERVAL, dtype=drawn.dtype)).tolist()
    return Figure(value.item(), low, high)


def interval(value: float, drawn: Sequence[float]) -> Figure:
    return _figure(torch.tensor(value), torch.tensor(list(drawn), dtype=torch.float64) if drawn else None)


_STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "first_perplexity": lambda sums: (sums[:, 1] / sums[:, 0]).exp(),
    "second_perplexity": lambda sums: (sums[:, 2] / sums[:, 0]).exp(),
    "perplexity_ratio": lambda sums: ((sums[:, 2] - sums[:, 1]) / sums[:, 0]).exp(),
    "top_1_agreement": lambda sums: sums[:, 3] / sums[:, 0],
    "kl_nats": lambda sums: sums[:, 4] / sums[:, 0],
}
