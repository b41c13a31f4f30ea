"""Drafts made where the model runs: by its own head or by a smaller model, from what a step has just computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.engine.step_plan import StepPlan
from phalanx.kernels.attention import AttentionBatch
from phalanx.kernels.draft_rows import Sequences, StepRows
from phalanx.kernels.drafts import keep_draft, prove
from phalanx.kernels.fp8 import Activations
from phalanx.kernels.sampling import draw, likeliest
from phalanx.kernels.sampling_table import TOKEN
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


class Drawing(NamedTuple):
    """What tokens are drawn by: a table of parameters, the row of it that each sequence has, and positions."""

    table: Tensor
    slots: Tensor
    positions: Tensor


class Guesser(Protocol):
    """Takes in every step, and guesses on: the first time `ahead` positions past the last row that stands."""

    ahead: int

    def take_in(self, step: Computed) -> None: ...

    def guess(self, tokens: Tensor, positions: Tensor, attention: AttentionBatch, drawing: Drawing | None) -> Tensor:
        """The token behind each of these, the last of their sequences: drawn, or the likeliest."""
        ...


class HeadGuesser:
    """The model's own head, which knows the token behind the last row already when it has taken it in."""

    ahead = 0

    def __init__(self, model: Decoder, head: DraftHeadPart) -> None:
        self._model, self._head = model, head
        self._handed: Activations | None = None
        self._is_new = True

    def take_in(self, step: Computed) -> None:
        inputs, handed = step.inputs, self._model.handed_on(step.hidden)
        size = self._model.block_size
        self._handed = self._head(step.following, handed, inputs.positions, inputs.attention, size, step.last)
        self._is_new = True

    def guess(self, tokens: Tensor, positions: Tensor, attention: AttentionBatch, drawing: Drawing | None) -> Tensor:
        assert self._handed is not None
        if not self._is_new:
            self._handed = self._head(tokens, self._handed, positions, attention, self._model.block_size)
        self._is_new = False
        if drawing is None:
            return self._head.likeliest(self._handed)
        return draw(self._head.scores(self._handed), *drawing)


class ModelGuesser:
    """A smaller model with the same tokens. Where it has fewer rows of vocabulary, those beyond are never meant."""

    ahead = 1

    def __init__(self, model: Decoder, vocab: int) -> None:
        self._model, self._vocab = model, vocab
        self._most = model.place.spec.vocab - 1

    def take_in(self, step: Computed) -> None:
        inputs = step.inputs
        self._model(inputs.tokens.clamp(max=self._most), inputs.positions, inputs.attention, step.last[:1])

    def guess(self, tokens: Tensor, positions: Tensor, attention: AttentionBatch, drawing: Drawing | None) -> Tensor:
        scores = self._model.scores(self._model(tokens.clamp(max=self._most), positions, attention))
        scores = scores[:, : self._vocab].contiguous()  # as a GPU's kernels take it
        return likeliest(scores) if drawing is None else draw(scores, *drawing)


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
        if sampled is None:
            following = self._batch.following(inputs)
            self._guesser.take_in(Computed(inputs, following, hidden, inputs.wanted))
            return None
        yields = torch.full_like(inputs.positions, -1)
        yields[inputs.wanted] = torch.arange(len(sampled), device=sampled.device)
        longest = max(map(int.__add__, plan.starts, plan.counts)) + plan.ahead + 1
        most, drawn = max(plan.samples), self.draws(plan)
        return self.make(inputs, yields, hidden, sampled, self._sequences(plan), most, plan.ahead, drawn, longest)

    def make(
        self,
        inputs: StepInputs,
        yields: Tensor,
        hidden: Tensor,
        sampled: Tensor,
        sequences: Sequences,
        most: int,
        ahead: int,
        drawn: bool,
        longest: int | None,
    ) -> Drafts | None:
        """`ahead` drafts of sequences that yield up to `most` tokens; with them they are no longer than `longest`.

        `yields` has the number of each row's token among those `sampled`, or -1. Nothing here asks the host.
        """
        places, offset = self._batch.places, self._guesser.ahead
        rows = StepRows(inputs.slots, inputs.positions, inputs.tokens, yields, inputs.wanted)
        proven = prove(places, rows, sampled, sequences, most, offset, ahead)
        self._guesser.take_in(Computed(inputs, proven.following, hidden, proven.last))
        if not ahead:
            return None
        drafts = torch.empty(len(proven.last), ahead, dtype=TOKEN, device=sampled.device)
        tokens, guess = proven.tokens, proven.guess
        for number in range(ahead):
            drawing = Drawing(self._batch.sampling, sequences.slots, guess.after) if drawn else None
            tokens = self._guesser.guess(tokens, guess.positions, self._batch.guess_inputs(guess, longest), drawing)
            guess = keep_draft(places, sequences, proven, drafts, tokens, number, offset)
        return Drafts(drafts, proven.counts)

    def _sequences(self, plan: StepPlan) -> Sequences:
        rows = [(slot, samples) for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        slots, samples = tensor_of([slot for slot, _ in rows]), tensor_of([count for _, count in rows])
        rooms = tensor_of([self._batch.room(slot) for slot, _ in rows])
        return Sequences(*self._batch.send(slots, rooms, samples.cumsum(0) - samples, samples))
