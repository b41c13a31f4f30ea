"""The small things between a step and the drafts behind it: which of its tokens stand, where guesses go, what a head
that drafts is given.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.draft_rows import Cache, Guess, Sequences, Standing, StepRows
from phalanx.kernels.lookup import places_of
from phalanx.kernels.norm import add_rms_norm
from phalanx.kernels.sampling_table import TOKEN


def prove(
    cache: Cache, rows: StepRows, sampled: Tensor, sequences: Sequences, most: int, offset: int, ahead: int
) -> Standing:
    """What stands of a step that yielded the tokens `sampled`, up to `most` of a sequence: those before the first
    that is not the draft in the next row, and that one.

    Up to `ahead` drafts follow, of which the first is computed `offset` positions behind the last row that stands.
    """
    if sampled.is_cuda:
        from phalanx.kernels.gpu import drafts as gpu

        return gpu.prove(cache, rows, sampled, sequences, most, offset, ahead)
    return prove_torch(cache, rows, sampled, sequences, most, offset, ahead)


def prove_torch(
    cache: Cache, rows: StepRows, sampled: Tensor, sequences: Sequences, most: int, offset: int, ahead: int
) -> Standing:
    """The definition."""
    chosen = sampled.clamp(min=0).to(TOKEN)
    behind = (rows.positions + 1).clamp(max=cache.tables.shape[-1] * cache.block_size - 1)
    known = cache.kept[places_of(cache.tables[0], rows.slots, behind, cache.block_size)]
    following = torch.where(rows.yields < 0, known, chosen[rows.yields.clamp(min=0)])
    number = torch.arange(most - 1, device=sampled.device)
    each = (sequences.first[:, None] + number).clamp(max=len(sampled) - 1)
    drafts = rows.tokens[(rows.wanted[each] + 1).clamp(max=len(rows.tokens) - 1)]
    right = (drafts == chosen[each]) & (number < sequences.samples[:, None] - 1)
    proven = sequences.first + right.long().cumprod(1).sum(1)
    last = rows.wanted[proven]
    positions = rows.positions[last]
    counts = (sequences.rooms - positions - offset).clamp(0, ahead)
    guess = _guess_torch(cache, sequences, positions, offset, 0)
    return Standing(following, last, chosen[proven], positions, counts, guess)


def keep_draft(
    cache: Cache, sequences: Sequences, proven: Standing, drafts: Tensor, tokens: Tensor, number: int, offset: int
) -> Guess:
    """These tokens become the drafts of this number, in its column and, where there is room, behind their sequences:
    rows that take them need not be told. Returns where the next ones are guessed.
    """
    if tokens.is_cuda:
        from phalanx.kernels.gpu import drafts as gpu

        return gpu.keep_draft(cache, sequences, proven.positions, drafts, tokens, number, offset)
    return keep_draft_torch(cache, sequences, proven.positions, drafts, tokens, number, offset)


def keep_draft_torch(
    cache: Cache, sequences: Sequences, positions: Tensor, drafts: Tensor, tokens: Tensor, number: int, offset: int
) -> Guess:
    """The definition. What there is no room for goes to the spare slot."""
    drafts[:, number] = tokens
    at = _guess_torch(cache, sequences, positions, 2, number)
    cache.kept[at.places[0]] = tokens.to(TOKEN)
    return _guess_torch(cache, sequences, positions, offset, number + 1)


def _guess_torch(cache: Cache, sequences: Sequences, positions: Tensor, offset: int, number: int) -> Guess:
    """So many positions behind the last row that stands, in the spare slot where there is no room."""
    at, spare = positions + offset + number, cache.tables.shape[1] - 1
    has_room = at < sequences.rooms
    slots, at = torch.where(has_room, sequences.slots, spare), torch.where(has_room, at, 0)
    places = places_of(cache.tables, slots, at, cache.block_size)
    return Guess(slots, at, places, positions + 2 + number)


def side_by_side(
    embedded: Tensor, handed: Tensor, norms: tuple[Tensor, Tensor], eps: float, tokens: Tensor | None = None
) -> Tensor:
    """What is embedded and what was handed on, each normed, [rows, 2 x width]. With `tokens`, `embedded` is the table
    from which they are looked up.
    """
    if handed.is_cuda:
        from phalanx.kernels.gpu import drafts as gpu

        return gpu.side_by_side(embedded, handed, norms, eps, tokens)
    looked_up = embedded if tokens is None else F.embedding(tokens, embedded)
    pairs = zip((looked_up, handed), norms, strict=True)
    return torch.cat([add_rms_norm(x, None, weight, eps) for x, weight in pairs], -1)
