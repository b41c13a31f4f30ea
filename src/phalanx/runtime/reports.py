"""What is found out of prompts besides the token behind them: log-probabilities of their own tokens, embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engine.logprobs import PromptLogprobs
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import StepPlan
from phalanx.layers.decoder import Decoder
from phalanx.runtime.batch import Batch, tensor_of
from phalanx.spec.step_memory import reported_at_once


@dataclass(frozen=True)
class Report:
    """What is asked of a part of a prompt: the rows of the step to look at, the first one's position, who asked.

    `ends`: whether the prompt ends with this part.
    """

    rows: range
    slot: int
    start: int
    params: SamplingParams
    ends: bool


def reports_of(plan: StepPlan, batch: Batch) -> list[Report]:
    """Of the rows that a plan marks. The hidden state of a token tells of the next one, which the last one has not."""
    found = []
    for index in plan.reported:
        slot, start, count = plan.slots[index], plan.starts[index], plan.counts[index]
        first, occupant = sum(plan.counts[:index]), batch.occupant(slot)
        left = occupant.prompt_length - start
        params, ends = occupant.params, left <= count
        if params.prompt_logprobs is not None:
            rows = range(first, first + min(count, left - 1))
        elif params.pooling == "mean":
            rows = range(first, first + count)
        else:
            rows = range(first + count - ends, first + count)
        found.append(Report(rows, slot, start, params, ends))
    return found


@dataclass(frozen=True)
class Found:
    """The reports that tell something, and what: log-probabilities as (own, rank, top values, top ids) of all rows
    that ask for them, and embeddings of prompts that end.
    """

    scored: list[Report]
    logprobs: tuple[Tensor, ...] | None
    pooled: list[Report]
    embeddings: Tensor | None

    def start_reading(self) -> Found:
        """A copy on its way to the host. It may be read once the device has come that far."""
        logprobs = None if self.logprobs is None else tuple(part.to("cpu", non_blocking=True) for part in self.logprobs)
        embeddings = None if self.embeddings is None else self.embeddings.to("cpu", non_blocking=True)
        return Found(self.scored, logprobs, self.pooled, embeddings)

    def read(self) -> tuple[list[tuple[int, PromptLogprobs]], list[tuple[int, bytes]]]:
        """By slot."""
        told, first = [], 0
        for report in self.scored:
            assert self.logprobs is not None
            assert report.params.prompt_logprobs is not None
            likeliest, rows = report.params.prompt_logprobs, slice(first, first + len(report.rows))
            own, ranks, values, ids = (part[rows] for part in self.logprobs)
            packed = (_packed(own, values[:, :likeliest]), _packed(ranks, ids[:, :likeliest]))
            told.append((report.slot, PromptLogprobs(report.start + 1, 1 + likeliest, *packed)))
            first += len(report.rows)
        vectors = () if self.embeddings is None else self.embeddings
        return told, [
            (report.slot, vector.numpy().tobytes()) for report, vector in zip(self.pooled, vectors, strict=True)
        ]


def _packed(own: Tensor, others: Tensor) -> bytes:
    return torch.cat([own[:, None], others], 1).numpy().tobytes()


class Reporter:
    """Works on the hidden states of rows that are reported on. Sums for means lie by slot: a prompt may come in parts,
    each of which adds to those before.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._sums: Tensor | None = None

    def __call__(self, model: Decoder, hidden: Tensor, reports: Sequence[Report]) -> Found:
        parts = hidden.split([len(report.rows) for report in reports])
        scored: list[Report] = []
        pooled: list[Report] = []
        states: list[Tensor] = []
        embeddings: list[Tensor] = []
        for report, part in zip(reports, parts, strict=True):
            if not report.rows:
                continue
            if report.params.pooling is None:
                scored.append(report)
                states.append(part)
                continue
            vector = self._pooled(model, part, report)
            if report.ends:
                pooled.append(report)
                embeddings.append(vector)
        return Found(
            scored,
            self._logprobs(model, torch.cat(states), scored) if scored else None,
            pooled,
            torch.stack(embeddings) if pooled else None,
        )

    def _logprobs(self, model: Decoder, hidden: Tensor, reports: Sequence[Report]) -> tuple[Tensor, ...]:
        """Scores of a whole prompt are too many to be held at once: it is done in slices."""
        slots: list[int] = []
        positions: list[int] = []
        for report in reports:
            slots += [report.slot] * len(report.rows)
            positions += range(report.start + 1, report.start + 1 + len(report.rows))
        tokens = self._batch.seen(*self._batch.send(tensor_of(slots), tensor_of(positions)))
        likeliest = max(report.params.prompt_logprobs or 0 for report in reports)
        size = reported_at_once(model.place.spec.vocab)
        told = [
            _told(model.scores(part), own, likeliest)
            for part, own in zip(hidden.split(size), tokens.split(size), strict=True)
        ]
        return tuple(torch.cat(column) for column in zip(*told, strict=True))

    def _pooled(self, model: Decoder, hidden: Tensor, report: Report) -> Tensor:
        """The embedding of a prompt up to the end of this part."""
        states = model.states(hidden).float()
        if report.params.pooling == "last":
            return states[-1]
        if self._sums is None:
            self._sums = states.new_zeros(self._batch.spare_slot, states.shape[1])
        total = self._sums[report.slot]
        total.copy_(states.sum(0) if report.start == 0 else total + states.sum(0))
        return total / (report.start + len(report.rows))


def _told(scores: Tensor, tokens: Tensor, likeliest: int) -> tuple[Tensor, ...]:
    """Of each token its log-probability and its rank, and which ones are the likeliest."""
    logprobs = torch.log_softmax(scores.float(), -1)
    own = logprobs.gather(1, tokens[:, None])
    values, ids = logprobs.topk(likeliest, dim=-1)
    return own[:, 0], (logprobs > own).sum(-1).int() + 1, values, ids.int()
