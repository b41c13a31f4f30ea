"""Tokens by the place of their keys and values: what rows read before the first layer, and leave behind the last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.sampling_table import TOKEN

NOWHERE = -1


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


def write_tokens(
    pool: TokenPool, tables: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor, block_size: int
) -> None:
    """Tokens at these positions of their slots, by the first group's tables. What was sampled there does not count."""
    if tokens.is_cuda:
        from phalanx.kernels.gpu import lookup as gpu

        gpu.write_tokens(pool.kept, pool.latest_at, tables, slots, positions, tokens, block_size, NOWHERE)
        return
    pool.kept[places_of(tables, slots, positions, block_size)] = tokens.to(TOKEN)
    pool.latest_at.index_fill_(0, slots, NOWHERE)
