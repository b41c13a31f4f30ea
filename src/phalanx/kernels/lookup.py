"""Tokens by the place of their keys and values: what rows read before the first layer, and leave behind the last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.sampling_table import TOKEN

NOWHERE = -1

TARGETS = 4
"""Of what is new: tables, sampling parameters, tokens, positions of the latest ones."""


@dataclass(frozen=True)
class TokenPool:
    """`kept` holds a token for every place of the cache, so that it takes no more room where sequences may be longer.

    A token that was sampled last has no place there yet: by slot, `latest` is that token and `latest_at` its position.
    """

    kept: Tensor
    latest: Tensor
    latest_at: Tensor

    @classmethod
    def of(cls, places: int, slots: int, device: torch.device) -> TokenPool:
        return cls(
            torch.zeros(places, dtype=TOKEN, device=device),
            torch.zeros(slots, dtype=TOKEN, device=device),
            torch.full((slots,), NOWHERE, device=device),
        )


def places_of(tables: Tensor, slots: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Where in the flattened cache these positions lie, by every group's tables, [groups, slots, blocks]."""
    return tables[..., slots, positions // block_size].long() * block_size + positions % block_size


def look_up(
    pool: TokenPool, tables: Tensor, slots: Tensor, positions: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """The rows' tokens, which then all have their place, and the rows' places in the cache, [groups, rows]."""
    if tables.is_cuda:
        from phalanx.kernels.gpu import lookup as gpu

        return gpu.look_up(pool.kept, pool.latest, pool.latest_at, tables, slots, positions, block_size)
    places = places_of(tables, slots, positions, block_size)
    latest, latest_at, kept = (
        column.index_select(0, where)
        for column, where in ((pool.latest, slots), (pool.latest_at, slots), (pool.kept, places[0]))
    )
    tokens = torch.where(latest_at == positions, latest, kept)
    pool.kept.index_copy_(0, places[0], tokens)
    return tokens, places


def tokens_at(kept: Tensor, tables: Tensor, slots: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The tokens that lie at these positions of these slots, by the first group's tables."""
    if kept.is_cuda:
        from phalanx.kernels.gpu import lookup as gpu

        return gpu.tokens_at(kept, tables, slots, positions, block_size)
    return kept[places_of(tables, slots, positions, block_size)].long()


def keep_sampled(pool: TokenPool, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """These tokens come next, at these positions of their slots: of several of one, which lie together, the last."""
    if tokens.is_cuda:
        from phalanx.kernels.gpu import lookup as gpu

        gpu.keep_sampled(pool.latest, pool.latest_at, slots, positions, tokens)
        return
    others = slots[1:] != slots[:-1]
    if not others.all():
        last = torch.cat([others, others.new_ones(1)])
        slots, positions, tokens = slots[last], positions[last], tokens[last]
    pool.latest.index_copy_(0, slots, tokens)
    pool.latest_at.index_copy_(0, slots, positions)


def take_in(pool: TokenPool, tables: Tensor, sampling: Tensor, news: Tensor, most: int) -> None:
    """Up to `most` numbers for these, as if each were flat, and for the pool's tokens and the positions of its latest
    ones. First comes how many there are up to each of the four, then the places of all, then the numbers.
    """
    if news.is_cuda:
        from phalanx.kernels.gpu import lookup as gpu

        gpu.take_in(tables, sampling, pool.kept, pool.latest_at, news, most)
        return
    ends = news[:TARGETS].tolist()
    first, last = 0, ends[-1]
    for target, end in zip((tables, sampling, pool.kept, pool.latest_at), ends, strict=True):
        places, values = (news.narrow(0, TARGETS + begin, end - first) for begin in (first, last + first))
        target.view(-1).index_copy_(0, places, values.to(target.dtype))
        first = end
