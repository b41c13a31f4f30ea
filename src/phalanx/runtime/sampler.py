"""Sampling: from logits to tokens, each row by its own parameters and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engine.logprobs import TokenLogprobs
from phalanx.engine.output import NO_TOKEN
from phalanx.engine.step_plan import StepPlan
from phalanx.kernels.lookup import keep_sampled
from phalanx.kernels.sampling import draw, flag_broken, likeliest
from phalanx.runtime.batch import Batch, Occupant
from phalanx.spec.step_memory import MOST_PENALTY_BYTES, penalised_row_bytes


@dataclass(frozen=True)
class SpecialRow:
    """A row whose scores something changes or reports: which one of those that yield a token, who asked, the position
    the token will have, and where to find the tokens that a grammar allows.
    """

    index: int
    occupant: Occupant
    slot: int
    position: int
    mask: int | None = None


@dataclass(frozen=True)
class SamplingRows:
    """The rows of a step that yield a token: their slots and the positions of those tokens. Most have no more to say.

    `drawn`: whether one of the plain ones is to be drawn at random.
    """

    slots: list[int]
    positions: list[int]
    special: list[SpecialRow]
    drawn: bool

    @classmethod
    def of(cls, plan: StepPlan, batch: Batch) -> SamplingRows:
        slots, positions = plan.yielded()
        masks = dict(plan.masks)
        plain_from = batch.plain_from
        found = {index for index, slot in enumerate(slots) if positions[index] < plain_from[slot]} | masks.keys()
        special = [
            SpecialRow(index, batch.occupant(slots[index]), slots[index], positions[index], masks.get(index))
            for index in sorted(found)
        ]
        is_drawn = batch.is_drawn
        drawn = any(is_drawn[slot] for index, slot in enumerate(slots) if index not in found)
        return cls(slots, positions, special, drawn)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class Sampled:
    """Tokens, and log-probabilities if some were asked for: (sampled, top values, top ids) of the special rows."""

    tokens: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None

    def start_reading(self) -> Sampled:
        """A copy on its way to the host behind the step that made it, and ahead of the next one.

        It may be read once the device has come that far.
        """
        if not self.tokens.is_cuda:
            return self
        tokens = self.tokens.to("cpu", non_blocking=True)
        parts = None if self.logprobs is None else tuple(part.to("cpu", non_blocking=True) for part in self.logprobs)
        return Sampled(tokens, parts)  # type: ignore[arg-type]

    def read(self, rows: SamplingRows) -> tuple[list[int], list[TokenLogprobs | None]]:
        read: list[TokenLogprobs | None] = [None] * len(rows)
        if self.logprobs is not None:
            for row, chosen, values, ids in zip(rows.special, *map(Tensor.tolist, self.logprobs), strict=True):
                wanted = row.occupant.params.logprobs
                if wanted is not None:
                    read[row.index] = TokenLogprobs(chosen, list(zip(ids, values, strict=True))[:wanted])
        return self.tokens.tolist(), read


class Sampler:
    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos = list(eos_token_ids)

    def __call__(self, scores: Tensor, rows: SamplingRows, batch: Batch, plain_tokens: Tensor | None = None) -> Sampled:
        """One token a row, which also goes into the batch's pool. `scores` may be changed.

        `plain_tokens` are those of the plain rows, where they have been chosen and put into the pool already.
        """
        special = rows.special
        if special and len(special) == len(rows):
            return self._sample_special(scores, special, batch)
        if plain_tokens is None:
            plain_tokens = flag_broken(_choose(scores, rows.slots, rows.positions, rows.drawn, batch), scores)
        if not special:
            return Sampled(plain_tokens, None)
        (where,) = batch.send(torch.tensor([row.index for row in special]))
        of_special = self._sample_special(scores[where], special, batch)
        return Sampled(plain_tokens.index_copy(0, where, of_special.tokens), of_special.logprobs)

    def _sample_special(self, scores: Tensor, rows: Sequence[SpecialRow], batch: Batch) -> Sampled:
        """Log-probabilities are the model's own, before grammar, penalties, bias and temperature."""
        scores = scores.float()
        reported = any(row.occupant.params.logprobs is not None for row in rows)
        raw = torch.log_softmax(scores, -1) if reported else None
        finite = scores.amax(-1).isfinite()
        self._adjust(scores, rows, batch)
        drawn = any(batch.is_drawn[row.slot] for row in rows)
        tokens = _choose(scores, [row.slot for row in rows], [row.position for row in rows], drawn, batch)
        logprobs = _logprobs_of(raw, tokens, rows) if raw is not None else None
        return Sampled(tokens.where(finite, NO_TOKEN), logprobs)

    def _adjust(self, scores: Tensor, rows: Sequence[SpecialRow], batch: Batch) -> None:
        """Grammar, minimum length, bias and penalties. What is sent to the device here, nobody waits for."""
        _keep_allowed(scores, rows, batch)
        vocab, flat = scores.shape[1], scores.view(-1)
        ends = [self._held_back(row, batch) for row in rows]
        held = [index * vocab + end for index, some in enumerate(ends) for end in some if end < vocab]
        if held:
            (places,) = batch.send(torch.tensor(held))
            flat.index_fill_(0, places, float("-inf"))
        bias = {
            index * vocab + token: value
            for index, row in enumerate(rows)
            for token, value in row.occupant.params.logit_bias.items()
        }
        if bias:
            places, values = batch.send(torch.tensor(list(bias)), _as_bits(list(bias.values())))
            flat.index_add_(0, places, values.view(torch.float64).float())
        _penalise(scores, rows, batch)

    def _held_back(self, row: SpecialRow, batch: Batch) -> list[int]:
        """No end before `min_tokens`, unless a grammar allows nothing else."""
        params = row.occupant.params
        if row.position - row.occupant.prompt_length >= params.min_tokens:
            return []
        ends = params.stop_token_ids if params.ignore_eos else [*self._eos, *params.stop_token_ids]
        if row.mask is not None:
            allowed = int.from_bytes(batch.masks.on_host[row.mask], "little")
            if not allowed & ~sum(1 << token for token in set(ends)):
                return []
        return ends


def _choose(scores: Tensor, slots: list[int], positions: list[int], drawn: bool, batch: Batch) -> Tensor:
    """Each row's token by the parameters of its slot, into the pool."""
    where, after = batch.send(torch.tensor(slots), torch.tensor(positions))
    tokens = draw(scores, batch.sampling, where, after) if drawn else likeliest(scores)
    keep_sampled(batch.tokens, where, after, tokens)
    return tokens


def _keep_allowed(scores: Tensor, rows: Sequence[SpecialRow], batch: Batch) -> None:
    """-inf for what the grammars of the rows forbid."""
    masks = {index: row.mask for index, row in enumerate(rows) if row.mask is not None}
    if masks:
        where, places = batch.send(torch.tensor(list(masks)), torch.tensor(list(masks.values())))
        scores[where] = scores[where].masked_fill(~batch.masks.allowed(places, scores.shape[1]), float("-inf"))


def _penalise(scores: Tensor, rows: Sequence[SpecialRow], batch: Batch) -> None:
    """All rows at once, or as many as need no more than a bounded memory, however long they are."""
    together: list[tuple[int, SpecialRow]] = []
    taken = 0
    for index, row in enumerate(rows):
        if row.occupant.params.penalised:
            needed = penalised_row_bytes(scores.shape[1], row.position)
            if together and taken + needed > MOST_PENALTY_BYTES:
                _penalise_together(scores, together, batch)
                together, taken = [], 0
            together.append((index, row))
            taken += needed
    if together:
        _penalise_together(scores, together, batch)


def _penalise_together(scores: Tensor, penalised: Sequence[tuple[int, SpecialRow]], batch: Batch) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output alone."""
    vocab, flat, total = scores.shape[1], scores.view(-1), sum(row.position for _, row in penalised)
    numbers = [(index, row.slot, row.position, row.occupant.prompt_length) for index, row in penalised]
    asked = [row.occupant.params for _, row in penalised]
    penalties = [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in asked]
    sent, bits = batch.send(torch.tensor(numbers).T.flatten(), _as_bits(penalties))
    where, slots, lengths, prompts = sent.view(4, -1)
    row_of = torch.arange(len(penalised), device=sent.device).repeat_interleave(lengths, output_size=total)
    position = torch.arange(total, device=sent.device) - (lengths.cumsum(0) - lengths)[row_of]
    seen = batch.seen(slots[row_of], position)
    factor, presence, frequency = bits.view(torch.float64).float().view(-1, 3)[row_of].unbind(1)
    places = where[row_of] * vocab + seen
    found = flat[places]
    changed = torch.where(found > 0, found / factor, found * factor)
    if any(each.presence_penalty or each.frequency_penalty for each in asked):
        said, at = (position >= prompts[row_of]).float(), row_of * vocab + seen
        counts = torch.zeros(len(penalised) * vocab, device=sent.device).index_add_(0, at, said)[at]
        changed -= frequency * counts + presence * (counts > 0)
    flat[places] = changed


def _as_bits(values: Sequence[float] | Sequence[tuple[float, ...]]) -> Tensor:
    """Numbers as `Batch.send` takes them."""
    return torch.tensor(values, dtype=torch.float64).flatten().view(torch.int64)


def _logprobs_of(raw: Tensor, tokens: Tensor, rows: Sequence[SpecialRow]) -> tuple[Tensor, Tensor, Tensor]:
    most = max(row.occupant.params.logprobs or 0 for row in rows)
    values, ids = raw.topk(most, dim=-1)
    return raw.gather(1, tokens[:, None].long())[:, 0], values, ids
