"""Drafts made where the model runs: by its own head or by a smaller model, from what a step has just computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.engine.step_plan import StepPlan
from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.sampling import draw, likeliest
from phalanx.layers.decoder import Decoder
from phalanx.layers.draft_head import DraftHeadPart
from phalanx.runtime.batch import Batch, StepInputs, tensor_of


@dataclass(frozen=True)
class Drafts:
    """For each sequence that yields a token its drafts, of which so many count."""

    tokens: Tensor
    counts: Tensor

    def start_reading(self) -> Drafts:
        """On its way to the host, as the tokens of the step are."""
        if not self.tokens.is_cuda:
            return self
        return Drafts(self.tokens.to("cpu", non_blocking=True), self.counts.to("cpu", non_blocking=True))

    def read(self) -> list[list[int]]:
        return [row[:count] for row, count in zip(self.tokens.tolist(), self.counts.tolist(), strict=True)]


@dataclass(frozen=True)
class Computed:
    """A step: its inputs, the token behind each row, what the model hands on, and of each sequence that yields a token
    the last row that stands.
    """

    inputs: StepInputs
    following: Tensor
    hidden: Tensor
    last: Tensor


class Guesser(Protocol):
    """Takes in every step, and guesses on: the first time `ahead` positions past the last row that stands."""

    ahead: int

    def take_in(self, step: Computed) -> None: ...

    def guess(self, tokens: Tensor, positions: Tensor, attention: AttentionBatch) -> Tensor:
        """Scores of the token behind these, each the last of its sequence."""
        ...


class HeadGuesser:
    """The model's own head, which knows the token behind the last row already when it has taken it in."""

    ahead = 0

    def __init__(self, model: Decoder, head: DraftHeadPart) -> None:
        self._model, self._head = model, head
        self._is_new = True

    def take_in(self, step: Computed) -> None:
        inputs, handed = step.inputs, self._model.handed_on(step.hidden)
        size = self._model.block_size
        self._handed = self._head(step.following, handed, inputs.positions, inputs.attention, size, step.last)
        self._is_new = True

    def guess(self, tokens: Tensor, positions: Tensor, attention: AttentionBatch) -> Tensor:
        if not self._is_new:
            self._handed = self._head(tokens, self._handed, positions, attention, self._model.block_size)
        self._is_new = False
        return self._head.scores(self._handed)


class ModelGuesser:
    """A smaller model with the same tokens. Where it has fewer rows of vocabulary, those beyond are never meant."""

    ahead = 1

    def __init__(self, model: Decoder, vocab: int) -> None:
        self._model, self._vocab = model, vocab
        self._most = model.place.spec.vocab - 1

    def take_in(self, step: Computed) -> None:
        inputs = step.inputs
        self._model(inputs.tokens.clamp(max=self._most), inputs.positions, inputs.attention, step.last[:1])

    def guess(self, tokens: Tensor, positions: Tensor, attention: AttentionBatch) -> Tensor:
        scores = self._model.scores(self._model(tokens.clamp(max=self._most), positions, attention))
        return scores[:, : self._vocab]


class Sequences(NamedTuple):
    """Those that yield tokens: slots, positions that have room, the first token of each among all, how many."""

    slots: Tensor
    rooms: Tensor
    first: Tensor
    samples: Tensor


class RankDrafts:
    """What a runner does behind its steps where drafts are made on its ranks, all of which make the same."""

    def __init__(self, model: Decoder, batch: Batch, guesser: Guesser) -> None:
        self._model, self._batch, self._guesser = model, batch, guesser

    @classmethod
    def of(cls, model: Decoder, batch: Batch) -> RankDrafts | None:
        if model.companion is not None:
            return cls(model, batch, ModelGuesser(model.companion, model.place.spec.vocab))
        return cls(model, batch, HeadGuesser(model, model.draft_head)) if model.draft_head is not None else None

    def empty_hidden(self, rows: int) -> Tensor:
        """Room for what the model makes of so many rows."""
        spec = self._model.place.spec
        return self._model.place.empty(rows, *([] if spec.hyper is None else [spec.streams]), spec.hidden)

    def draws(self, plan: StepPlan) -> bool:
        """Whether some sequence's tokens are drawn."""
        return any(self._batch.is_drawn[slot] for slot in plan.slots)

    def __call__(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, sampled: Tensor | None) -> Drafts | None:
        """`plan.ahead` drafts for each sequence that yields tokens, behind the last of them that stands."""
        following = self._batch.following(inputs)
        if sampled is None:
            self._guesser.take_in(Computed(inputs, following, hidden, inputs.wanted))
            return None
        following[inputs.wanted] = sampled.long()
        longest = max(map(int.__add__, plan.starts, plan.counts)) + plan.ahead + 1
        most, drawn = max(plan.samples), self.draws(plan)
        return self.make(inputs, following, hidden, sampled, self._sequences(plan), most, plan.ahead, drawn, longest)

    def make(
        self,
        inputs: StepInputs,
        following: Tensor,
        hidden: Tensor,
        sampled: Tensor,
        sequences: Sequences,
        most: int,
        ahead: int,
        drawn: bool,
        longest: int | None,
    ) -> Drafts | None:
        """`ahead` drafts of sequences that yield up to `most` tokens; with them they are no longer than `longest`.

        Nothing here asks the host.
        """
        proven = _proven(inputs, sampled, sequences.first, sequences.samples, most)
        last = inputs.wanted[proven]
        self._guesser.take_in(Computed(inputs, following, hidden, last))
        if not ahead:
            return None
        positions = inputs.positions[last]
        rooms = sequences.rooms - positions - self._guesser.ahead
        tokens, drafts = sampled[proven], []
        for number in range(ahead):
            at, has_room = positions + number + self._guesser.ahead, number < rooms
            where = self._with_room(has_room, sequences.slots, at)
            scores = self._guesser.guess(tokens, where[1], self._batch.places(*where, longest))
            after = positions + 2 + number
            tokens = draw(scores, self._batch.sampling, sequences.slots, after) if drawn else likeliest(scores)
            self._batch.guess(*self._with_room(after < sequences.rooms, sequences.slots, after), tokens)
            drafts.append(tokens)
        return Drafts(torch.stack(drafts, 1), rooms.clamp(0, ahead))

    def _with_room(self, has_room: Tensor, slots: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Where a sequence has no room left, what is guessed of it goes to the spare slot, and is of no use."""
        return torch.where(has_room, slots, self._batch.spare_slot), torch.where(has_room, at, 0)

    def _sequences(self, plan: StepPlan) -> Sequences:
        rows = [(slot, samples) for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        slots, samples = tensor_of([slot for slot, _ in rows]), tensor_of([count for _, count in rows])
        rooms = tensor_of([self._batch.room(slot) for slot, _ in rows])
        return Sequences(*self._batch.send(slots, rooms, samples.cumsum(0) - samples, samples))


def _proven(inputs: StepInputs, sampled: Tensor, first: Tensor, samples: Tensor, most: int) -> Tensor:
    """The last token of each sequence that stands: behind those that equal the draft in their place."""
    if most == 1:
        return first
    number = torch.arange(most - 1, device=first.device)
    each = (first[:, None] + number).clamp(max=len(sampled) - 1)
    drafts = inputs.tokens[(inputs.wanted[each] + 1).clamp(max=len(inputs.tokens) - 1)]
    right = (drafts == sampled[each]) & (number < samples[:, None] - 1)
    return first + right.long().cumprod(1).sum(1)
