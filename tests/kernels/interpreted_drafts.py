"""What stands of a step and where drafts go, by the Triton kernels on a CPU; run with TRITON_INTERPRET=1."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from phalanx.kernels.draft_rows import Cache, Sequences, StepRows
from phalanx.kernels.drafts import keep_draft_torch, prove_torch, side_by_side
from phalanx.kernels.gpu import drafts as gpu
from phalanx.kernels.norm import add_rms_norm_torch
from tests.kernels.interpreter import make_ready

PAGE, WIDTH, VOCAB = 4, 6, 2


def column(values: list[int], size: int, filler: int) -> Tensor:
    return torch.tensor(values + [filler] * (size - len(values)))


def step(sequences: int, most: int, padding: int, random: Random) -> tuple[Cache, StepRows, Tensor, Sequences]:
    """Rows of sequences that yield one to `most` tokens each, some behind a token that yields none; few tokens, so that
    many a draft comes true.
    """
    spare, longest = sequences, PAGE * WIDTH
    slots, positions, yields, wanted, rooms, firsts, samples = ([] for _ in range(7))
    for slot in range(sequences):
        yielded = random.randint(1, most)
        count = yielded + (random.random() < 0.3)
        start = random.randint(0, longest - count)
        rooms.append(min(longest, start + count + random.randint(0, 5)))
        firsts.append(len(wanted))
        samples.append(yielded)
        for place in range(count):
            is_yielding = place >= count - yielded
            yields.append(len(wanted) if is_yielding else -1)
            wanted += [len(slots)] if is_yielding else []
            slots.append(slot)
            positions.append(start + place)
    size, of = len(slots) + padding, sequences + padding
    tables = torch.stack([torch.randperm((spare + 1) * WIDTH).view(spare + 1, WIDTH) for _ in range(2)]).int()
    kept = torch.randint(VOCAB, ((spare + 1) * WIDTH * PAGE,), dtype=torch.int32)
    tokens = torch.randint(VOCAB, (size,), dtype=torch.int32)
    sampled = torch.randint(-1, VOCAB, (size,), dtype=torch.int32)
    in_rows = column(slots, size, spare), column(positions, size, 0)
    rows = StepRows(*in_rows, tokens, column(yields, size, -1), column(wanted, size, 0))
    owners = column(list(range(sequences)), of, spare), column(rooms, of, 0)
    told = Sequences(*owners, column(firsts, of, 0), column(samples, of, 1))
    return Cache(kept, tables, PAGE), rows, sampled, told


def check(sequences: int, most: int, padding: int, offset: int, ahead: int, random: Random) -> set[int]:
    """Returns how many tokens stand of a sequence."""
    cache, rows, sampled, told = step(sequences, most, padding, random)
    same = cache._replace(kept=cache.kept.clone())
    expected = prove_torch(cache, rows, sampled, told, most, offset, ahead)
    found = gpu.prove(same, rows, sampled, told, most, offset, ahead)
    for one, other in zip((*found[:-1], *found.guess), (*expected[:-1], *expected.guess), strict=True):
        assert torch.equal(one, other)
    drafts, others = (torch.zeros(len(told.slots), ahead, dtype=torch.int32) for _ in range(2))
    for number in range(ahead):
        tokens = torch.randint(100, 200, told.slots.shape, dtype=torch.int32)
        guess = keep_draft_torch(cache, told, expected.positions, drafts, tokens, number, offset)
        as_well = gpu.keep_draft(same, told, expected.positions, others, tokens, number, offset)
        for one, other in zip(as_well, guess, strict=True):
            assert torch.equal(one, other)
    assert torch.equal(drafts, others)
    spare = cache.tables[0, -1].long()
    owned = torch.ones(len(cache.kept) // PAGE, dtype=torch.bool).index_fill(0, spare, False).repeat_interleave(PAGE)
    assert torch.equal(cache.kept[owned], same.kept[owned])
    assert int((cache.kept[owned] >= 100).sum()) > 0, "some have room"
    standing = rows.yields[expected.last[:sequences]] - told.first[:sequences]
    return set(standing.tolist())


def check_side_by_side(rows: int, width: int, dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    table, handed = torch.randn(50, width).to(dtype), torch.randn(rows, width).to(dtype)
    norms = torch.randn(width).to(norm_dtype), torch.randn(width).to(norm_dtype)
    tokens = torch.randint(50, (rows,), dtype=torch.int32)
    halves = [add_rms_norm_torch(x, None, w, 1e-5) for x, w in zip((table[tokens], handed), norms, strict=True)]
    for given, looked_up in ((table, tokens), (table[tokens], None)):
        found = gpu.side_by_side(given, handed, norms, 1e-5, looked_up)
        torch.testing.assert_close(found, torch.cat(halves, 1))
        torch.testing.assert_close(side_by_side(given, handed, norms, 1e-5, looked_up), torch.cat(halves, 1))


if __name__ == "__main__":
    make_ready()
    torch.manual_seed(0)
    random = Random(0)
    assert check(40, 4, 3, 0, 3, random) == {0, 1, 2, 3}
    check(130, 2, 0, 1, 2, random)
    assert check(9, 1, 7, 0, 1, random) == {0}
    check(60, 9, 1, 1, 8, random)
    check_side_by_side(1, 96, torch.float32, torch.float32)
    check_side_by_side(5, 128, torch.float16, torch.float16)
    check_side_by_side(3, 130, torch.float16, torch.float32)
