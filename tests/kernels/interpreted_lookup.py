"""Tokens looked up and kept by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from phalanx.kernels import lookup
from phalanx.kernels.gpu import lookup as gpu
from phalanx.kernels.lookup import TokenPool
from tests.kernels.interpreter import make_ready

PAGE, SLOTS, WIDTH = 4, 9, 6


def check(groups: int, rows: int) -> None:
    """Rows at places of their own, some of which hold the latest token of their slot, and several rows of one slot."""
    tables = torch.stack([torch.randperm(SLOTS * WIDTH).view(SLOTS, WIDTH) for _ in range(groups)]).int()
    spots = torch.randperm(SLOTS * WIDTH * PAGE)[:rows]
    slots, positions = spots // (WIDTH * PAGE), spots % (WIDTH * PAGE)
    pool = TokenPool.of(SLOTS * WIDTH * PAGE, SLOTS, torch.device("cpu"))
    pool.kept.copy_(torch.randint(1000, pool.kept.shape))
    pool.latest.copy_(torch.randint(1000, 2000, pool.latest.shape))
    pool.latest_at[slots[::2]] = positions[::2]
    same = TokenPool(pool.kept.clone(), pool.latest.clone(), pool.latest_at.clone())
    tokens, places = lookup.look_up(pool, tables, slots, positions, PAGE)
    assert rows == 1 or {*(tokens >= 1000).tolist()} == {True, False}
    found, found_places = gpu.look_up(same.kept, same.latest, same.latest_at, tables, slots, positions, PAGE)
    assert torch.equal(found, tokens)
    assert torch.equal(found_places, places)
    assert torch.equal(same.kept, pool.kept)
    seen = lookup.tokens_at(pool.kept, tables[0], slots, positions, PAGE)
    assert torch.equal(seen, tokens.long())
    assert torch.equal(gpu.tokens_at(same.kept, tables[0], slots, positions, PAGE), seen)
    some = torch.randperm(SLOTS)[: min(rows, SLOTS)].repeat_interleave(3)
    chosen, after = torch.randint(3000, some.shape, dtype=torch.int32), torch.randint(99, some.shape)
    lookup.keep_sampled(pool, some, after, chosen)
    gpu.keep_sampled(same.latest, same.latest_at, some, after, chosen)
    assert torch.equal(same.latest, pool.latest)
    assert torch.equal(same.latest_at, pool.latest_at)
    targets = [[tables, torch.zeros(SLOTS, 5, dtype=torch.int64), each.kept, each.latest_at] for each in (pool, same)]
    targets[1][:2] = [target.clone() for target in targets[0][:2]]
    counts = [min(count, target.numel()) for count, target in zip((rows, 7, rows, 3), targets[0], strict=True)]
    places = [torch.randperm(target.numel())[:count] for count, target in zip(counts, targets[0], strict=True)]
    news = torch.cat([torch.tensor(counts).cumsum(0), *places, torch.randint(-5000, 5000, (sum(counts),))])
    before = [target.clone() for target in targets[0]]
    for most in (sum(counts), sum(counts) + 300):
        for target, was in zip(targets[1], before, strict=True):
            target.copy_(was)
        gpu.take_in(*targets[1], news, most)
        lookup.take_in(pool, tables, targets[0][1], news, most)
        for found_in, expected, was in zip(*targets, before, strict=True):
            assert torch.equal(found_in, expected)
            assert not torch.equal(found_in, was)


if __name__ == "__main__":
    make_ready()
    torch.manual_seed(0)
    for groups, rows in ((1, 1), (1, 127), (3, 128), (2, 129), (1, 200)):
        check(groups, rows)
